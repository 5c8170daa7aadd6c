"""The most memory a step takes on the device, against a closed form and the loop by hand.

The model is a stack of L linear layers of U bytes each (width W, float32, no bias), a unit each, and as many rows as
are wide, so that the activations of a layer take U bytes as well. At its peak, before the optimizer steps, the device
holds

- the activations: ``L * U``,
- under ``fsdp`` the shards, their gradients and both moments of AdamW: ``4 * L * U``; under offload none of these,
- in flight, for one layer in backward and the one gathered ahead: two gathered units, the flat copy of a gather, the
  unit's gradient, the flat copy of its reduction, and the gradients of an input and of an output: ``7 * U``.

So ``(5 * L + 7) * U`` under ``fsdp`` and ``(L + 7) * U`` with offload.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from cases import Case, Failed, Machine
from section_step import free
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from shard_core import get_strategy

WIDTH, LAYERS, IN_FLIGHT, ALLOWED, STEPS = 4096, 64, 7, 0.05, 3


def cases(machine: Machine) -> list[Case]:
    """List the cases, in order of worth."""
    del machine
    names = ("fsdp", "fsdp_cpu_offload")
    return [Case(name, functools.partial(peak, name, seconds), seconds) for name, seconds in zip(names, (20, 60), strict=True)]


def stack(machine: Machine) -> nn.Sequential:
    """Build the layers on the device."""
    width, layers = (16, 4) if machine.quick else (WIDTH, LAYERS)
    with torch.device(machine.device):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def peak(name: str, seconds: float, machine: Machine) -> dict[str, Any]:
    """Measure the peak of ours and of the loop by hand; fail where ours is not what the form says."""
    del seconds
    strategy = get_strategy(name, accelerator=machine.device, devices=1, unit_bytes=1)
    strategy.setup_environment()
    try:
        found = {"ours": _ours(strategy, machine), "raw": _raw(name == "fsdp_cpu_offload", machine)}
    finally:
        strategy.teardown()
        free(machine)
    machine.need_cuda("counting what is allocated")
    unit = 4 * (16 if machine.quick else WIDTH) ** 2
    layers = 4 if machine.quick else LAYERS
    form = (layers * (1 if name == "fsdp_cpu_offload" else 5) + IN_FLIGHT) * unit
    left = torch.cuda.memory_allocated()
    figures = {f"{which}_{what}": value for which, each in found.items() for what, value in each.items()}
    figures |= {"form": form, "over_form": found["ours"]["peak"] / form, "after_teardown": left}
    if machine.quick:
        return figures
    if abs(figures["over_form"] - 1) > ALLOWED:
        raise Failed(f"the peak is {figures['over_form']:.3f} of the closed form, allowed 5 % apart", figures)
    if name == "fsdp_cpu_offload" and found["ours"]["before_step"] > 2 * unit:
        raise Failed("after setup with offload more than two units are still on the device", figures)
    if left > unit:
        raise Failed(f"after teardown {left / 1e6:.0f} MB are still allocated", figures)
    return figures


def _measure(step: Any, rows: int, machine: Machine) -> dict[str, int]:
    cuda = machine.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    inputs = torch.ones(rows, rows, device=machine.device)
    for number in range(STEPS):
        if number and cuda:  # the first step makes the moments
            torch.cuda.reset_peak_memory_stats()
        step(inputs)
    machine.synchronize()
    return {"before_step": before, "peak": torch.cuda.max_memory_allocated() if cuda else 0}


def _ours(strategy: Any, machine: Machine) -> dict[str, int]:
    model: Any = stack(machine)
    rows, optimizer = model[0].in_features, torch.optim.AdamW(model.parameters(), fused=True)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    free(machine)

    def step(inputs: torch.Tensor) -> None:
        strategy.backward(model(inputs).mean(), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()

    return _measure(step, rows, machine)


def _raw(offloads: bool, machine: Machine) -> dict[str, int]:
    free(machine)
    model = stack(machine)
    rows = model[0].in_features
    policy = CPUOffloadPolicy(pin_memory=machine.device == "cuda") if offloads else OffloadPolicy()
    mesh = init_device_mesh(machine.device, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    free(machine)

    def step(inputs: torch.Tensor) -> None:
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _measure(step, rows, machine)
