from __future__ import annotations

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.strategy.quantization import quantized_part

SENTENCE = r"'1.weight' is Params4bit of bitsandbytes, and no strategy keeps quantised weights .*; load the model"


class Params4bit(nn.Parameter):
    """What bitsandbytes calls its four-bit weights."""

    __module__ = "bitsandbytes.nn.modules"


class WQLinear(nn.Module):
    """What packs weights into plain buffers."""

    __module__ = "awq.modules.linear"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(2, 2, dtype=torch.int32))


class Float8Linear(nn.Linear):
    """What computes in eight bits, and trains weights that are none."""

    __module__ = "torchao.float8.float8_linear"


class FP8Linear(nn.Module):
    """What transformers keeps in eight bits, beside the scales without which the numbers mean nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(1, 1), requires_grad=False)


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = Params4bit(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    return model


def test_weights_and_layers_and_models_are_recognised_by_where_they_come_from() -> None:
    assert quantized_part(nn.Sequential(nn.Linear(2, 2))) is None
    assert quantized_part(quantized()) == ("1.weight", "Params4bit of bitsandbytes")
    assert quantized_part(nn.Sequential(WQLinear())) == ("0", "WQLinear of awq")
    model = nn.Linear(2, 2)
    model.quantization_method = "fp8"
    assert quantized_part(nn.ModuleDict({"base": model})) == ("base", "quantised by fp8")


def test_layers_of_such_libraries_may_train_plain_weights() -> None:
    assert quantized_part(nn.Sequential(Float8Linear(2, 2))) is None


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_every_strategy_refuses_them_by_name_and_leaves_them_as_they_are(name: str) -> None:
    model = quantized()
    with get_strategy(name, accelerator="cpu", devices=1) as strategy, pytest.raises(SetupError, match=SENTENCE):
        strategy.setup_module(model)
    assert type(model[1].weight) is Params4bit


def test_weights_in_eight_bits_are_not_cast_without_their_scales() -> None:
    model = nn.ModuleDict({"base": FP8Linear(), "lora": nn.Linear(4, 4)})
    model.quantization_method = "fp8"
    sentence = "'the module' is quantised by fp8, and no strategy keeps"
    with get_strategy("single", accelerator="cpu") as strategy, pytest.raises(SetupError, match=sentence):
        strategy.setup_module(model)
    assert model["base"].weight.dtype is torch.float8_e4m3fn
