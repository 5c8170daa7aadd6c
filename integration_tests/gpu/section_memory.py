"""The most memory a step takes on the device, against a closed form and the loop by hand.

The model is a stack of L linear layers of U bytes each (width W, float32, no bias), a unit each, and as many rows as
are wide, so that the activations of a layer take U bytes as well. In backward the device holds

- activations of the layers that are still to come and gradients of those that are done, ``L * U`` together; with
  offload gradients leave, and the most is at its beginning, ``L * U`` of activations,
- under ``fsdp`` the shards and both moments of AdamW, ``3 * L * U``; under offload none of these,
- in flight, for one layer and the one gathered ahead: two gathered units, the flat copy of a gather, the unit's
  gradient, the flat copy of its reduction, and the gradients of an input and of an output: ``7 * U``.

So the peak is ``(4 * L + 7) * U`` under ``fsdp`` and ``(L + 7) * U`` with offload.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from cases import Case, Failed, Machine, free, started
from llama_loops import adamw, sharded
from loops import Ours, Raw
from torch import nn

from shard_core.tuning.memory import weigh

WIDTH, LAYERS, IN_FLIGHT, ALLOWED = 4096, 64, 7, 0.05


def cases() -> list[Case]:
    """List the cases, in order of worth."""
    expected = {"fsdp": 20, "fsdp_cpu_offload": 45}
    return [Case(name, functools.partial(peak, name), seconds) for name, seconds in expected.items()]


def peak(name: str, machine: Machine) -> dict[str, Any]:
    """Measure the peak of ours and of the loop by hand; fail where ours is not what the form says."""
    width, layers, offload = *((16, 4) if machine.quick else (WIDTH, LAYERS)), name == "fsdp_cpu_offload"

    def stack() -> nn.Sequential:
        with torch.device(machine.device):
            return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def raw() -> Raw:
        model = stack()
        return Raw(sharded(model, [[layer] for layer in model], machine.device, offload=offload), adamw)

    with started(name, machine, unit_bytes=1) as strategy:
        before, ours = _measure(lambda: Ours(strategy, stack(), adamw), width, machine)
        _, by_hand = _measure(raw, width, machine)
    machine.need_cuda("counting what is allocated")
    left, unit = torch.cuda.memory_allocated(), 4 * width * width
    form = (layers * (1 if offload else 4) + IN_FLIGHT) * unit
    figures = {"ours": ours, "raw": by_hand, "form": form, "ours_over_form": ours / form}
    figures |= {"ours_over_raw": ours / by_hand, "after_setup": before, "after_teardown": left}
    if machine.judges and abs(ours / form - 1) > ALLOWED:
        raise Failed(f"the peak is {ours / form:.3f} of the closed form, allowed 5 % apart", figures)
    if machine.judges and offload and before > 2 * unit:
        raise Failed("after setup with offload more than two units are still on the device", figures)
    if machine.judges and left > unit:
        raise Failed(f"after teardown {left / 1e6:.0f} MB are still allocated", figures)
    return figures


def _measure(build: Callable[[], Any], width: int, machine: Machine) -> tuple[int, int]:
    """Return what is allocated after setup, and at most in the second step, since the first makes the moments."""
    before = _allocated(machine)
    loop, inputs = build(), torch.ones(width, width, device=machine.device)
    held = _allocated(machine) - before - inputs.nbytes
    # The loss is a mean of values as they are: squaring them would keep them.
    _, most = weigh(lambda: loop.step(inputs), torch.device(machine.device))
    return held, (most or 0) - before


def _allocated(machine: Machine) -> int:
    free(machine)
    return torch.cuda.memory_allocated() if machine.device == "cuda" else 0
