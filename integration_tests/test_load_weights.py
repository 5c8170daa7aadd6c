"""Weights that other libraries wrote, loaded under every strategy without any rank holding the whole model."""

import re
from pathlib import Path
from typing import Any

import hugging_face
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from shard_core import get_strategy
from shard_core.checkpoint.interop.hf_export import export
from shard_core.errors import CheckpointMismatch
from shard_core.testing.oracle import assert_same_weights

WORLDS = [("single", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)]


def pretrained(name: str, folder: Path, dtype: torch.dtype = torch.float32, size: str = "40KB") -> Path:
    """Write a folder of weights with transformers that nobody else has."""
    torch.manual_seed(29)
    model: Any = hugging_face.make(name)
    model.to(dtype).save_pretrained(folder, max_shard_size=size)
    return folder


def outputs_and_theirs(strategy_name: str, name: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Load without ever computing initial values where that is promised; compute beside transformers."""
    (batch,) = hugging_face.batches(name, 1, 3)
    with get_strategy(strategy_name) as strategy:
        with strategy.module_init_context(empty_init=True if strategy_name == "fsdp" else None):
            model = hugging_face.make(name)
        model = strategy.setup_module(model)
        assert strategy.load_weights(folder, model) == ()
        model.eval()
        theirs = type(hugging_face.make(name)).from_pretrained(folder).eval()
        state = theirs.state_dict()
        for key, tensor in strategy.full_parameters(model):
            assert torch.equal(tensor, state[key]), key
        with torch.no_grad():
            return model(**batch).logits, theirs(**batch).logits


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "mixtral"])
@pytest.mark.parametrize(("strategy", "size"), WORLDS)
def test_models_compute_what_from_pretrained_gives(
    worlds: Any, tmp_path: Path, strategy: str, size: int, name: str
) -> None:
    folder = pretrained(name, tmp_path / "weights")
    assert len(list(folder.glob("*.safetensors"))) > 1
    for ours, theirs in worlds(size).run(outputs_and_theirs, strategy, name, folder, timeout=120):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "has shape (4, 32, 24) here, (3, 32, 24) in the files"),
        ((5, 5), "'model.layers.1.block_sparse_moe.experts.2.w2.weight' is in the files, but not here"),
    ],
)
def test_what_cannot_be_converted_is_listed_and_nothing_changed(
    tmp_path: Path, change: tuple[int, int] | None, says: str
) -> None:
    weights = load_file(pretrained("mixtral", tmp_path / "whole", size="1GB") / "model.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert expert in weights, "the library's files have other names now"
    if change:
        weights[expert] = torch.zeros(change)
    else:
        del weights[expert]
    save_file(weights, tmp_path / "model.safetensors")
    with get_strategy("single", accelerator="cpu") as strategy:
        model = strategy.setup_module(hugging_face.make("mixtral"))
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        with pytest.raises(CheckpointMismatch, match=re.escape(says)):
            strategy.load_weights(tmp_path / "model.safetensors", model)
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
        with pytest.warns(UserWarning, match="experts.down_proj"):
            left = strategy.load_weights(tmp_path / "model.safetensors", model, strict=False)
        loaded = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"][2, :24]
        assert torch.equal(loaded, weights["model.layers.1.block_sparse_moe.experts.2.w1.weight"])
        assert any(says in each for each in left)


def trained(strategy_name: str, folder: Path) -> Any:
    with get_strategy(strategy_name) as strategy:
        with strategy.module_init_context():
            model = hugging_face.make("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        strategy.load_weights(folder, model, cast=True)
        for batch in hugging_face.batches("gpt2", 2, 4):
            rank, size = strategy.global_rank, strategy.world_size
            strategy.backward(model(**{key: value.chunk(size)[rank] for key, value in batch.items()}).loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {key: tensor.clone() for key, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize(("strategy", "size"), WORLDS)
def test_training_goes_on_from_weights_of_another_dtype(worlds: Any, tmp_path: Path, strategy: str, size: int) -> None:
    folder = pretrained("gpt2", tmp_path / "weights", torch.bfloat16)
    model: Any = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in hugging_face.batches("gpt2", 2, 4):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = dict(model.named_parameters())
    for weights in worlds(size).run(trained, strategy, folder, timeout=120):
        assert_same_weights({key: weights[key] for key in truth}, truth, 1e-5)


def resaved(strategy_name: str, name: str, folder: Path, checkpoint: Path) -> None:
    with get_strategy(strategy_name) as strategy:
        model = strategy.setup_module(hugging_face.make(name))
        strategy.load_weights(folder, model)
        strategy.save_checkpoint(checkpoint, {"model": model})


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_comes_in_goes_out_bit_for_bit(worlds: Any, tmp_path: Path, name: str) -> None:
    folder = pretrained(name, tmp_path / "weights")
    worlds(2).run(resaved, "fsdp", name, folder, tmp_path / "c", timeout=120)
    export(tmp_path / "c", tmp_path / "out", config=folder, max_shard_size=40_000)
    found = [{key: t for file in each.glob("*.safetensors") for key, t in load_file(file).items()} for each in
             (folder, tmp_path / "out")]  # fmt: skip
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def write_distributed(folder: Path) -> dict[str, torch.Tensor]:
    """Train a step with FSDP2 alone and save as torch's tutorials do; give the whole tensors."""
    torch.manual_seed(31)
    model = hugging_face.make("llama")
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (batch,) = hugging_face.batches("llama", 1, 2)
    model(**batch).loss.backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), "step": 1}
    dcp.save(state, checkpoint_id=folder)
    return {key: tensor.full_tensor() for key, tensor in state["model"].items()}


def loaded(strategy_name: str, folder: Path) -> dict[str, torch.Tensor]:
    with get_strategy(strategy_name) as strategy:
        model = strategy.setup_module(hugging_face.make("llama"))
        assert strategy.load_weights(folder, model, key="model") == ()
        return {key: tensor.clone() for key, tensor in strategy.full_parameters(model)}


def test_folders_of_distributed_checkpoints_load_at_other_sizes(worlds: Any, tmp_path: Path) -> None:
    written = worlds(2).run(write_distributed, tmp_path / "distributed", timeout=120)[0]
    for strategy, size in WORLDS:
        for tensors in worlds(size).run(loaded, strategy, tmp_path / "distributed", timeout=120):
            torch.testing.assert_close(tensors, written, rtol=0, atol=0)
