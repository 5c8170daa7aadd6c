from __future__ import annotations

import json

import pytest
import torch
from fixtures.single_rank import save
from safetensors.torch import load_file, save_file
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint.interop.hf_export import export
from shard_core.errors import CheckpointCorrupted, CheckpointMismatch, InvalidOption

CONFIG = {"peft_type": "LORA", "r": 2, "bias": "lora_only"}


class _Adapted(nn.Module):
    """A layer under the names that PEFT gives its parts."""

    def __init__(self, *adapters):
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({name: nn.Linear(4, 2, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 4, bias=False) for name in adapters})

    def forward(self, x):
        adapted = (self.lora_B[name](down(x)) for name, down in self.lora_A.items())
        return self.base_layer(x) + sum(adapted)


class _Whole(nn.Module):
    """A layer that is trained and saved as a whole, under the names that PEFT gives its copies."""

    def __init__(self, *adapters):
        super().__init__()
        self.original_module = nn.Linear(4, 1)
        self.modules_to_save = nn.ModuleDict({name: nn.Linear(4, 1) for name in adapters})


class _Model(nn.Module):
    def __init__(self, *adapters):
        super().__init__()
        self.query, self.head = _Adapted(*adapters), _Whole(*adapters)


NAMES = {
    "base_model.model.query.lora_A.weight": "query.lora_A.{}.weight",
    "base_model.model.query.lora_B.weight": "query.lora_B.{}.weight",
    "base_model.model.query.base_layer.bias": "query.base_layer.bias",
    "base_model.model.head.weight": "head.modules_to_save.{}.weight",
    "base_model.model.head.bias": "head.modules_to_save.{}.bias",
}


def _folder(path, tensors=None, config=None):
    path.mkdir()
    content = CONFIG if config is None else config
    (path / "adapter_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    if tensors is not None:
        save_file(tensors, path / "adapter_model.safetensors")
    return path


def _filled(folder, *adapters, **options):
    """Load into a model and return its state before and after."""
    with get_strategy("single", accelerator="cpu") as strategy:
        model = strategy.setup_module(_Model(*adapters))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        strategy.load_weights(folder, model, **options)
        return before, model.state_dict()


def test_one_of_several_adapters_goes_out_and_comes_in(tmp_path):
    model = _Model("first", "second")
    save(tmp_path / "c", model)
    config = _folder(tmp_path / "config")
    with pytest.raises(InvalidOption, match=r"has the adapters 'first', 'second' .*; say which with adapter=NAME"):
        export(tmp_path / "c", tmp_path / "out", config=config)
    with pytest.raises(InvalidOption, match=r"has no adapters 'secondary'; did you mean 'second'\?"):
        export(tmp_path / "c", tmp_path / "out", config=config, adapter="secondary")
    exported = export(tmp_path / "c", tmp_path / "out", config=config, adapter="second")
    assert exported.files == ("adapter_model.safetensors",)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == CONFIG
    wanted = {stored: model.state_dict()[name.format("second")] for stored, name in NAMES.items()}
    torch.testing.assert_close(load_file(tmp_path / "out" / exported.files[0]), wanted, rtol=0, atol=0)
    export(tmp_path / "c", tmp_path / "out", config=config, adapter="second", overwrite=True)

    before, after = _filled(tmp_path / "out", "first", adapter="first")
    filled = {name.format("first"): wanted[stored] for stored, name in NAMES.items()}
    torch.testing.assert_close(after, {**before, **filled}, rtol=0, atol=0)


def test_what_lacks_or_is_left_over_is_a_difference(tmp_path):
    weights = {stored: torch.zeros(4, 2) for stored in list(NAMES)[1:2]}
    folder = _folder(tmp_path / "f", {**weights, "base_model.model.key.lora_B.weight": torch.zeros(1)})
    with pytest.raises(CheckpointMismatch) as raised:
        _filled(folder, "default")
    message = str(raised.value)
    assert "'query.lora_A.default.weight' is not in the files" in message
    assert "'base_model.model.key.lora_B.weight' (here 'key.lora_B.weight') is in the files, but not here" in message
    assert "'query.base_layer.weight'" not in message


def test_what_cannot_be_named_is_refused_in_a_sentence(tmp_path):
    weights = {"w": torch.zeros(1)}
    with pytest.raises(InvalidOption, match="of adapters of type 'VERA', and only PEFT knows how it names them"):
        _filled(_folder(tmp_path / "vera", weights, {"peft_type": "VERA"}), "default")
    with pytest.raises(InvalidOption, match=r"has the adapters none of the type 'LORA' .* add them first"):
        _filled(_folder(tmp_path / "none", weights))
    with pytest.raises(CheckpointCorrupted, match=r"is no configuration of adapters; it names no 'peft_type'"):
        _filled(_folder(tmp_path / "damaged", weights, "[]"), "default")
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(InvalidOption, match="adapter='default' is for a folder of PEFT's adapters"):
        _filled(tmp_path / "w.safetensors", "default", adapter="default")
    both = _folder(tmp_path / "both")
    (both / "config.json").write_text("{}")
    save(tmp_path / "c", _Model("default"))
    with pytest.raises(InvalidOption, match="holds the configuration of a model and of adapters"):
        export(tmp_path / "c", tmp_path / "out", config=both)
    with pytest.raises(InvalidOption, match=r"adapter='default' is for adapters alone; give their adapter_config.json"):
        export(tmp_path / "c", tmp_path / "out", adapter="default")


def test_what_was_saved_without_what_is_frozen_is_no_model_to_export(tmp_path):
    with get_strategy("single", accelerator="cpu") as strategy:
        model = _Model("default")
        model.query.base_layer.requires_grad_(False)
        strategy.save_checkpoint(tmp_path / "c", {"model": strategy.setup_module(model)}, frozen=False)
    with pytest.raises(InvalidOption, match="was saved without what is frozen, so it is no whole model"):
        export(tmp_path / "c", tmp_path / "out")


def test_a_save_without_what_is_frozen_is_whole_where_nothing_was(tmp_path):
    with get_strategy("single", accelerator="cpu") as strategy:
        strategy.save_checkpoint(tmp_path / "c", {"model": strategy.setup_module(_Model("default"))}, frozen=False)
    assert export(tmp_path / "c", tmp_path / "out").tensors == len(_Model("default").state_dict())


def test_what_was_left_out_of_another_module_is_not_missed(tmp_path):
    with get_strategy("single", accelerator="cpu") as strategy:
        base, head = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2)
        base[0].requires_grad_(False)
        state = {"base": strategy.setup_module(base), "head": strategy.setup_module(head)}
        strategy.save_checkpoint(tmp_path / "c", state, frozen=False)
    assert export(tmp_path / "c", tmp_path / "head", module="head").tensors == 2
    assert export(tmp_path / "c", tmp_path / "trained", module="base", prefix="1.").tensors == 2
    for prefix in ("", "0."):
        with pytest.raises(InvalidOption, match="was saved without what is frozen, so it is no whole model"):
            export(tmp_path / "c", tmp_path / "none", module="base", prefix=prefix)
