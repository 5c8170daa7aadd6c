from __future__ import annotations

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.strategies.single import SingleStrategy
from shard_core.strategy.quantization import quantized_part

SETUP = r"'1.weight' is Params4bit of bitsandbytes, and strategy 'single' would not keep it what it is .*under 'ddp'"


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


class Sharding(SingleStrategy):
    """An engine that lays parameters out anew."""

    engine_keeps_quantized = False


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


def test_an_engine_that_would_lay_them_out_anew_refuses_them_by_name() -> None:
    with Sharding(accelerator="cpu") as strategy, pytest.raises(SetupError, match=SETUP):
        strategy.setup_module(quantized())
    with get_strategy("single", accelerator="cpu") as strategy:
        assert type(strategy.setup_module(quantized())[1].weight) is Params4bit
