"""``save_pretrained`` of a module that was set up, and ``from_pretrained`` of one that is about to be."""

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import hugging_face
import pytest
import torch
import transformers
from safetensors.torch import load_model, save_file

from shard_core import get_strategy
from shard_core.errors import CheckpointError, CollectiveError, SetupError

#: Whether a rank holds the weights whole.
STRATEGIES = {"ddp": True, "deepspeed_stage_1": True, "deepspeed_stage_3": False, "fsdp": False, "tp": False}


class Tagger(torch.nn.Module):
    """A user's own module around a pretrained one."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.tags = torch.nn.Linear(hugging_face.VOCABULARY, 3)
        self.model = model

    def forward(self, **batch: torch.Tensor) -> Any:
        output = self.model(**batch)
        return output.loss + self.tags(output.logits).square().mean()


def tied() -> Any:
    """Build a model whose head is its embedding."""
    config = hugging_face.make("llama").config.to_dict()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, "tie_word_embeddings": True}))


def save(name: str, folder: Path, wrapped: bool) -> tuple[dict[str, torch.Tensor], str]:
    """Train a little, then save as every rank, with a state dict of one's own, and at last as rank 0 alone."""
    # Else stage 3 keeps models as small as these whole.
    away = {"param_persistence_threshold": 0} if name == "deepspeed_stage_3" else {}
    with get_strategy(name, guard_timeout=timedelta(seconds=20), **away) as strategy:
        strategy.seed_everything(3)
        with strategy.module_init_context():
            model = Tagger(tied()) if wrapped else tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        if name == "deepspeed_stage_3":
            with pytest.raises(SetupError, match="module_state_dict"):
                strategy.unwrap(model).state_dict()
        for batch in hugging_face.batches("llama", 2, 4):
            rank, size = (strategy.distributed_sampler_kwargs[key] for key in ("rank", "num_replicas"))
            output = model(**{key: value.chunk(size)[rank] for key, value in batch.items()})
            strategy.backward(output if wrapped else output.loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()

        module: Any = strategy.unwrap(model).model if wrapped else strategy.unwrap(model)
        module.save_pretrained(folder / "every", max_shard_size="20KB")
        if not STRATEGIES[name]:  # else nobody waits: rank 0 alone may call
            assert (folder / "every" / "model.safetensors.index.json").exists(), "not complete when it returns"
        whole = {key.removeprefix("model.") if wrapped else key: value for key, value in own(strategy, model).items()}
        if strategy.is_global_zero:
            module.save_pretrained(folder / "given", state_dict=dict(whole))
        strategy.barrier("given")
        message = ""
        try:
            if strategy.is_global_zero:
                module.save_pretrained(folder / "alone")
            strategy.barrier("saved")
        except CollectiveError as error:
            message = str(error)
    assert "save_pretrained" not in vars(module), "teardown leaves the method to its class"
    return whole, message


def own(strategy: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy, on every rank, what was trained."""
    state = {key: value.clone() for key, value in strategy.module_state_dict(model).items()}
    return {key: value for key, value in strategy.broadcast(state).items() if not key.startswith("tags.")}


def check(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    loaded, loading_info = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading_info
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(dict(loaded.state_dict()), weights, rtol=0, atol=0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_save_pretrained_writes_what_was_trained(
    worlds: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    answers = worlds(2).run(save, name, tmp_path, name in ("deepspeed_stage_3", "fsdp"), timeout=120)
    for _, message in answers:
        assert ("module_state_dict" in message and "save_pretrained" in message) != STRATEGIES[name], message
    for way in ("every", "given", *(["alone"] if STRATEGIES[name] else [])):
        check(tmp_path / way, answers[0][0])


class Mixture(torch.nn.Module):
    """A model of another library, whose method asks for nothing but a folder, and whose parts have one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([Expert(), Expert()])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            inputs = expert(inputs)
        return inputs

    def save_pretrained(self, folder: Path) -> str:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "all.pt")
        for number, expert in enumerate(self.experts):
            expert.save_pretrained(folder, number)
        return str(folder)


class Expert(torch.nn.Linear):
    """A part with a method of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def save_pretrained(self, folder: Path, number: int) -> None:
        if number > 1:
            raise OSError("no room for so many")
        torch.save(self.state_dict(), folder / f"{number}.pt")


def save_mixture(name: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    with get_strategy(name) as strategy:
        strategy.seed_everything(3)
        module: Any = Mixture()
        model = strategy.setup_module(module)
        written = module.save_pretrained(folder)
        if name == "fsdp":
            with pytest.raises(CheckpointError, match="no room for so many"):  # on every rank
                module.experts[1].save_pretrained(folder, 2)
        else:
            copied = copy.deepcopy(module)
            assert copied.experts[0].save_pretrained.__self__ is copied.experts[0]
        assert not any("save_pretrained" in key for key in module.state_dict())
        return written, dict(strategy.full_parameters(model))


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_methods_that_take_no_state_dict_write_whole_tensors_too(worlds: Any, tmp_path: Path, name: str) -> None:
    (written, weights), (nothing, _) = worlds(2).run(save_mixture, name, tmp_path / "m", timeout=120)
    assert (written, nothing) == (str(tmp_path / "m"), None)
    torch.testing.assert_close(dict(torch.load(tmp_path / "m" / "all.pt")), weights, rtol=0, atol=0)
    for number in range(2):
        part = {key: weights[f"experts.{number}.{key}"] for key in ("weight", "bias")}
        torch.testing.assert_close(dict(torch.load(tmp_path / "m" / f"{number}.pt")), part, rtol=0, atol=0)


def save_compiled(folder: Path) -> dict[str, torch.Tensor]:
    with get_strategy("fsdp") as strategy:
        module: Any = Mixture()
        module.experts[1] = torch.compile(module.experts[1], backend="aot_eager")
        model = strategy.setup_module(torch.compile(module, backend="aot_eager"))
        module.save_pretrained(folder)
        return dict(strategy.full_parameters(model))


def test_modules_compiled_before_setup_write_their_weights(worlds: Any, tmp_path: Path) -> None:
    weights, _ = worlds(2).run(save_compiled, tmp_path / "m", timeout=120)
    torch.testing.assert_close(dict(torch.load(tmp_path / "m" / "all.pt")), weights, rtol=0, atol=0)
    part = {key: weights[f"experts.1.{key}"] for key in ("weight", "bias")}
    torch.testing.assert_close(dict(torch.load(tmp_path / "m" / "1.pt")), part, rtol=0, atol=0)


def resized(folder: Path) -> Any:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(hugging_face.VOCABULARY + 3, mean_resizing=False)
    return model


def filled_from(folder: Path) -> torch.nn.Module:
    """Load as libraries do that know nothing of contexts."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    load_model(model[0], str(folder / "linear.safetensors"))
    model[1].load_state_dict(torch.load(folder / "linear.pt"))
    return model


BUILDS = {
    "loaded": transformers.LlamaForCausalLM.from_pretrained,
    "with a new head": lambda folder: transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=3),
    "resized": resized,
    "filled": filled_from,
}


def load(name: str, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for build in BUILDS if name == "fsdp" else ["loaded"]:
        with get_strategy(name) as strategy:
            strategy.seed_everything(11)
            with strategy.module_init_context():
                module: Any = BUILDS[build](folder)
            model = strategy.setup_module(module)
            found[build] = {key: tensor.clone() for key, tensor in strategy.full_parameters(model)}
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_from_pretrained_gives_the_values_of_the_folder(
    worlds: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    torch.manual_seed(41)
    tied().save_pretrained(tmp_path)
    linear = torch.nn.Linear(3, 3).state_dict()
    torch.save(linear, tmp_path / "linear.pt")
    save_file(linear, tmp_path / "linear.safetensors")
    for found in worlds(2).run(load, name, tmp_path, timeout=120):
        for build, weights in found.items():
            torch.manual_seed(11)
            torch.testing.assert_close(weights, dict(BUILDS[build](tmp_path).state_dict()), rtol=0, atol=0)
