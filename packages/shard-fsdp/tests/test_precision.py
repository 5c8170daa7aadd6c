"""In which dtypes shards travel and compute, from either of torch's objects or from the precision."""

import dataclasses
from typing import Any

import pytest
import torch
from layouts import LAYOUTS
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.nn import functional
from wire import Wire

from shard_core import InvalidOption, get_strategy
from shard_core.backend import POLICIES
from shard_core.testing import models, set_up, step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CAST = dataclasses.replace(
    POLICIES["32-true"], name="bf16-cast", compute="bfloat16", reduce="float32", buffer="bfloat16"
)
"""A table of one's own: products in bfloat16 without autocast."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "bf16"}, "mixed_precision is 'bf16'; give torch's MixedPrecision or MixedPrecisionPolicy"),
        ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "has keep_low_precision_grads=True; grad"),
        (
            {"mixed_precision": MixedPrecision(cast_forward_inputs=True, cast_root_forward_inputs=False)},
            "cast_root_forward_inputs=False; inputs are cast in every unit or in none",
        ),
        ({"mixed_precision": MixedPrecision(_module_classes_to_ignore=(nn.LayerNorm,))}, "a unit has one dtype"),
        (
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=FP16), "precision": "bf16-mixed"},
            "says that products are float16, and precision 'bf16-mixed' that they are bfloat16; leave one of them out",
        ),
        (
            {"mixed_precision": MixedPrecision(param_dtype=BF16), "precision": "bf16-mixed"},
            "says that gradients travel in bfloat16, and precision 'bf16-mixed' that they are float32",
        ),
        (
            {"mixed_precision": MixedPrecision(buffer_dtype=BF16), "precision": "64-true"},
            "says that buffers are bfloat16, and precision '64-true' that they are float64",
        ),
    ],
)
def test_what_contradicts_or_has_no_counterpart_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("fsdp", **options)


class Watching(nn.Module):
    """Notes the dtypes its layers meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.zeros(6))
        self.met: dict[str, str] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        loss = functional.mse_loss(self.second(hidden), torch.zeros(len(x), 4, dtype=hidden.dtype))
        seen = {"input": x, "weight": self.first.weight, "hidden": hidden, "loss": loss, "buffer": self.shift}
        self.met = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in seen.items()}
        return loss


def travels(layout: str, options: dict[str, Any]) -> Any:
    with get_strategy(layout, **LAYOUTS[layout], **options) as strategy:
        model, optimizer = set_up(strategy, Watching, "adamw")
        with Wire() as wire:
            strategy.backward(model(torch.ones(3, 6)), model)
        weight = model.first.weight
        stored = {weight.dtype, weight.grad.dtype}
        strategy.optimizer_step(optimizer)
        stored |= {slot.dtype for slots in optimizer.state.values() for slot in slots.values() if slot.dim()}
        scales = strategy.precision.scaler is not None
        return set(wire.gathers), set(wire.scatters), stored, model.met, scales


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("options", "gathered", "reduced", "met", "scaled"),
    [
        ({}, FP32, FP32, {"weight": "float32", "hidden": "float32"}, False),
        (
            {"precision": "bf16-mixed"},
            FP32,
            FP32,
            {"weight": "float32", "hidden": "bfloat16", "loss": "float32"},
            False,
        ),
        (
            {"mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=BF16)},
            BF16,
            FP32,
            {"input": "bfloat16", "weight": "bfloat16", "loss": "bfloat16", "buffer": "bfloat16"},
            False,
        ),
        (
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=FP16)},
            FP16,
            FP16,
            {"input": "float16", "hidden": "float16", "buffer": "float32"},
            True,
        ),
        ({"mixed_precision": MixedPrecisionPolicy(reduce_dtype=BF16)}, FP32, BF16, {"hidden": "float32"}, False),
        (
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), "precision": "bf16-mixed"},
            BF16,
            FP32,
            {"weight": "bfloat16", "hidden": "bfloat16", "loss": "float32"},
            False,
        ),
        ({"precision": CAST}, BF16, FP32, {"input": "bfloat16", "hidden": "bfloat16", "buffer": "bfloat16"}, False),
    ],
)
def test_dtypes_on_the_wire_and_in_the_forward(
    worlds: Any,
    layout: str,
    options: dict[str, Any],
    gathered: torch.dtype,
    reduced: torch.dtype,
    met: dict[str, str],
    scaled: bool,
) -> None:
    for gathers, scatters, stored, seen, scales in worlds(2).run(travels, layout, options):
        assert (gathers, scatters) == ({gathered}, {reduced})
        assert stored == {FP32}, "what is stepped stays in float32"
        assert met.items() <= seen.items()
        assert scales == scaled


UNCAST = MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=False)


def casts_of_inputs(options: dict[str, Any]) -> str:
    with get_strategy("fsdp", **options) as strategy:
        model = strategy.setup_module(Watching())
        try:
            model(torch.ones(3, 6))
        except RuntimeError as error:
            return str(error)
        return model.met["input"]


def test_inputs_are_cast_unless_the_policy_forbids_it(worlds: Any) -> None:
    assert worlds(2).run(casts_of_inputs, {"mixed_precision": MixedPrecision(param_dtype=BF16)}) == ["bfloat16"] * 2
    for message in worlds(2).run(casts_of_inputs, {"mixed_precision": UNCAST}):
        assert "must have the same dtype" in message


def losses(options: dict[str, Any]) -> list[float]:
    with get_strategy("fsdp", **options) as strategy:
        model, optimizer = set_up(strategy, "gpt", "adamw")
        return [step(strategy, model, optimizer, batch) for batch in models.batches("gpt", 6, 12)]


def test_float16_on_the_wire_still_learns(worlds: Any) -> None:
    exact = worlds(2).run(losses, {})[0]
    cast = worlds(2).run(losses, {"mixed_precision": MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32)})[0]
    assert cast == pytest.approx(exact, rel=2e-2)
    assert cast != exact
