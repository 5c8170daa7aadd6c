"""The conformance kit on the device, collectives of two ranks on one device, and precisions beside plain PyTorch."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from cases import Case, Failed, Later, Machine, Skipped
from loops import Ours, Raw, started
from rank_script import answer_of, run_ranks
from torch import nn
from torch.nn import functional

from shard_core import plugins
from shard_core.backend import POLICIES

KITS_AT_ONCE, KIT_SECONDS, QUICK_PROMISE = 10, 330.0, "micro_batches_add_up"
APART = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""How far losses and weights may be apart, relatively, by the dtype that is computed in."""
OPTIMIZERS = (
    functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),  # the usual eps is 0 in float16
)
_running: dict[str, Future[tuple[int, str, str, float]]] = {}


def cases() -> list[Case]:
    """List the cases, in order of worth."""
    found = [each for each in plugins.installed() if each.info is None or "cuda" in each.info.devices]
    # An engine with dtypes of its own does not compute as plain PyTorch does; the kit judges it.
    plain = [each.name for each in found if each.info is not None and not each.info.policies and not each.problem]
    return [
        *(Case(f"precisions of {name}", functools.partial(precisions, name), 12) for name in plain),
        Case("gloo, two ranks on one device", collectives, 40),
        *(Case(f"kit: {each.name}", functools.partial(judge, each.name, each.problem), 2) for each in found),
    ]


def begin(chosen: Sequence[str], machine: Machine) -> None:
    """Start the kits of the chosen cases: they run beside one another and beside all else, since little is computed."""
    pool = ThreadPoolExecutor(1 if machine.quick else KITS_AT_ONCE)
    usable = [each.name for each in plugins.installed() if not each.problem and f"kit: {each.name}" in chosen]
    _running.update({name: pool.submit(run_kit, name, machine) for name in usable})


def judge(name: str, problem: str | None, machine: Machine) -> dict[str, Any]:
    """Count the promises that are kept; fail with those that are broken."""
    if problem:
        raise Skipped(problem)
    if name in _running and not _running[name].done():
        raise Later
    code, output, errors, seconds = _running.pop(name).result() if name in _running else run_kit(name, machine)
    if code not in (0, 1) or not output.startswith("["):
        raise Failed(f"the kit ended with {code}: {' '.join((errors.strip() or output).splitlines()[-1:])}")
    verdicts = json.loads(output)
    words = [each["status"] for each in verdicts]
    of = {word: {e["promise"]: e["reason"] for e in verdicts if e["status"] == word} for word in dict.fromkeys(words)}
    broken = of.get("broken", {})
    figures: dict[str, Any] = {"counts": {word: len(those) for word, those in of.items()}, "broken": broken}
    figures |= {"not_judged": of.get("not judged", {}), "kit_seconds": round(seconds, 1)}
    if broken:
        raise Failed(f"{len(broken)} promises are broken: {', '.join(broken)}", figures)
    return figures


def run_kit(name: str, machine: Machine) -> tuple[int, str, str, float]:
    """Return the kit's exit code, what it has written, and how long it took."""
    command = [sys.executable, "-m", "shard_core.testing", name, "--device", machine.device, "--world-sizes", "1"]
    command += ["--json", *(["--promise", QUICK_PROMISE] if machine.quick else [])]
    given = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ}
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=KIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return -1, "", f"it took longer than {KIT_SECONDS:.0f} s", KIT_SECONDS
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


def collectives(machine: Machine) -> dict[str, Any]:
    """Try each collective of two ranks over gloo with tensors of the device; ours must all work."""
    (code, text), *_ = run_ranks("collectives", 2, machine.device, 120)
    found = answer_of(text)
    if found is None:
        raise Failed(f"two ranks on one device ended with {code}: {' '.join(text.strip().splitlines()[-1:])}")
    refused = {name: why for name, why in found.items() if why}
    figures = {"carried": [name for name in found if name not in refused], "refused": refused}
    if refused:
        raise Failed(f"over gloo on one device these fail: {', '.join(refused)}", figures)
    return figures


class Small(nn.Module):
    """Matrix products and a norm, with the loss inside, where autocast sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 8)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = self.last(functional.gelu(self.norm(self.first(inputs))))
        return functional.mse_loss(outputs, targets)


def precisions(name: str, machine: Machine) -> dict[str, Any]:
    """Train in every precision with SGD and AdamW beside plain PyTorch on the same device, under the same autocast."""
    figures: dict[str, Any] = {}
    for precision in plugins.find(name).precisions:
        for make in OPTIMIZERS:
            losses, weights = _ours(name, precision, make, machine)
            plain_losses, plain_weights = _plain(precision, make, machine)
            apart = [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, plain_losses, strict=True)]
            distance = float((weights - plain_weights).norm() / plain_weights.norm())
            figures[f"{precision} {make.func.__name__}"] = {"losses": max(apart), "weights": distance}
    allowed = {key: APART[POLICIES[key.split()[0]].compute] for key in figures}
    wrong = [key for key, each in figures.items() if not max(each.values()) <= allowed[key]]
    if wrong:
        raise Failed(f"{name} ends away from plain PyTorch under {', '.join(wrong)}", figures)
    return figures


def _data(machine: Machine) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.randn(8, 16, 72, generator=torch.Generator().manual_seed(2)).to(machine.device)
    return [(each[:, :64], each[:, 64:]) for each in drawn]


def _vector(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].cpu().double().flatten() for name in sorted(weights)])


def _ours(name: str, precision: str, make: Any, machine: Machine) -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    with started(name, machine, precision=precision) as strategy:
        loop = Ours(strategy, Small(), make)
        losses = [loop.step(*batch).item() for batch in _data(machine)]
        return losses, _vector(strategy.module_state_dict(loop.model))


def _plain(precision: str, make: Any, machine: Machine) -> tuple[list[float], torch.Tensor]:
    table = POLICIES[precision]
    held = getattr(torch, table.parameter)
    torch.manual_seed(0)
    loop = Raw(Small().to(machine.device, held), make)
    if table.autocast:
        loop.context = functools.partial(torch.autocast, machine.device, getattr(torch, table.compute))
    if table.scaled:
        loop.scaler = torch.amp.GradScaler(machine.device)
    losses = [loop.step(*(each.to(held) for each in batch)).item() for batch in _data(machine)]
    return losses, _vector(loop.model.state_dict())
