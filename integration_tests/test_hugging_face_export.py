"""Checkpoints of Hugging Face models go out as folders that ``from_pretrained`` loads, with equal weights."""

import os
from pathlib import Path
from typing import Any

import hugging_face
import pytest
import torch
import transformers

from shard_core import get_strategy
from shard_core.checkpoint.interop.hf_export import export


def save(strategy_name: str, name: str, path: Path, tied: bool = True) -> dict[str, torch.Tensor]:
    """Save a model after a step; give the weights as a plain module's state dict would."""
    with get_strategy(strategy_name) as strategy:
        strategy.seed_everything(3)
        with strategy.module_init_context():
            model = make(name, tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        (batch,) = hugging_face.batches(name, 1, 6)
        rank, size = strategy.global_rank, strategy.world_size
        loss = model(**{key: value.chunk(size)[rank] for key, value in batch.items()}).loss
        strategy.backward(loss, model)
        strategy.optimizer_step(optimizer)
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer, "step": 1})
        return {key: value.clone() for key, value in strategy.full_parameters(model)}


def make(name: str, tied: bool = True) -> Any:
    model: Any = hugging_face.make(name)
    if name == "llama" and tied:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**model.config.to_dict(), "tie_word_embeddings": True})
        )
    return model


CASES = [("single", 1, "gpt2", True), ("fsdp", 2, "gpt2", True), ("fsdp", 2, "llama", True), ("ddp", 2, "llama", False)]


@pytest.mark.parametrize(("strategy", "size", "name", "tied"), [*CASES, ("fsdp", 2, "vit", False)])
def test_from_pretrained_loads_what_was_trained(
    worlds: Any, tmp_path: Path, strategy: str, size: int, name: str, tied: bool
) -> None:
    weights = worlds(size).run(save, strategy, name, tmp_path / "c", tied, timeout=120)[0]
    model = make(name, tied)
    model.config.save_pretrained(tmp_path / "config")
    exported = export(tmp_path / "c", tmp_path / "out", config=tmp_path / "config", max_shard_size=40_000)
    assert len(exported.files) > 1
    loaded, loading_info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading_info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading_info
    state = loaded.state_dict()
    assert weights.keys() <= state.keys()
    for key, tensor in weights.items():
        assert torch.equal(state[key], tensor), key
    if name != "vit":
        is_tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert is_tied == bool(exported.tied) == tied


def test_what_transformers_writes_itself_is_no_other(tmp_path: Path) -> None:
    """The same names, tied ones stored once, and the dtype that was asked for."""
    torch.manual_seed(0)
    with get_strategy("single", accelerator="cpu") as strategy:
        model: Any = make("gpt2")
        strategy.save_checkpoint(tmp_path / "c", {"model": strategy.setup_module(model)})
    model.bfloat16().save_pretrained(tmp_path / "theirs")
    export(tmp_path / "c", tmp_path / "ours", config=tmp_path / "theirs", dtype="bf16")
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    ours, theirs = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("ours", "theirs"))
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    from safetensors.torch import load_file

    files = [load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs")]
    torch.testing.assert_close(files[0], files[1], rtol=0, atol=0)
