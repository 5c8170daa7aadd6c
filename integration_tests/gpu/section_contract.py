"""The conformance kit on the device, collectives of two ranks on one device, and precisions beside plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from cases import Case, Failed, Machine, Skipped
from llama_loops import Kind
from rank_script import answer_of, run_ranks
from section_step import free
from torch import nn
from torch.nn import functional

from shard_core import get_strategy, plugins
from shard_core.backend import POLICIES

KITS_AT_ONCE, KIT_SECONDS, QUICK_PROMISE = 6, 330.0, "micro_batches_add_up"
APART = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""How far losses and weights may be apart, relatively, by the dtype that is computed in."""


def cases(machine: Machine) -> list[Case]:
    """List the cases, in order of worth; the kits run beside one another from the first on."""
    found = [each for each in plugins.installed() if each.info is None or machine.device in each.info.devices]
    plain = [each.name for each in found if each.info is not None and not each.info.policies and not each.problem]
    kits = Kits([each.name for each in found])
    return [
        *(Case(f"precisions of {name}", functools.partial(precisions, name), 12) for name in plain),
        Case("gloo, two ranks on one device", collectives, 40),
        *(Case(f"kit: {each.name}", functools.partial(kits.judge, each.name, each.problem), 15) for each in found),
    ]


class Kits:
    """Runs the kit on strategies, several at a time, since most of it computes little."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._running: dict[str, Future[tuple[int, str, str]]] = {}

    def judge(self, name: str, problem: str | None, machine: Machine) -> dict[str, Any]:
        """Return how many promises were kept; fail with the broken ones."""
        if problem:
            raise Skipped(problem)
        if machine.quick:
            self._names = [name]
        if name not in self._running:
            pool = ThreadPoolExecutor(KITS_AT_ONCE)
            later = self._names[self._names.index(name) :]
            self._running |= {each: pool.submit(_kit, each, machine) for each in later}
        code, output, errors = self._running[name].result()
        if code not in (0, 1) or not output.startswith("["):
            raise Failed(f"the kit ended with {code}: {(errors.strip() or output).splitlines()[-1:]}")
        verdicts = json.loads(output)
        words = [each["status"] for each in verdicts]
        broken = {each["promise"]: each["reason"] for each in verdicts if each["status"] == "broken"}
        figures = {"counts": {word: words.count(word) for word in dict.fromkeys(words)}, "broken": broken}
        figures["not_judged"] = {each["promise"]: each["reason"] for each in verdicts if each["status"] == "not judged"}
        if broken:
            raise Failed(f"{len(broken)} promises are broken: {', '.join(broken)}", figures)
        return figures


def _kit(name: str, machine: Machine) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "shard_core.testing", name, "--device", machine.device, "--world-sizes", "1"]
    command += ["--json", *(["--promise", QUICK_PROMISE] if machine.quick else [])]
    given = {"OMP_NUM_THREADS": "2", **os.environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=given, timeout=KIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return -1, "", f"it took longer than {KIT_SECONDS:.0f} s"
    return done.returncode, done.stdout, done.stderr


def collectives(machine: Machine) -> dict[str, Any]:
    """Try each collective of two ranks over gloo with tensors of the device; ours must all work."""
    (code, text), *_ = run_ranks("collectives", 2, machine.device, 120)
    found = answer_of(text)
    if found is None:
        raise Failed(f"two ranks on one device ended with {code}: {text.strip().splitlines()[-1:]}")
    figures = {"carried": [name for name, why in found.items() if not why]}
    figures |= {"refused": {name: why for name, why in found.items() if why}}
    wrong = [name for name in figures["refused"] if name.startswith("ours")]
    if wrong:
        raise Failed(f"over gloo on one device {', '.join(wrong)} did not work", figures)
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
    wrong = []
    for precision in plugins.find(name).precisions:
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            settings: dict[str, Any] = {"lr": 1e-2} | ({"eps": 1e-4} if kind is torch.optim.AdamW else {"momentum": 0.9})
            make = functools.partial(kind, **settings)
            apart = _apart(_ours(name, precision, make, machine), _plain(precision, make, machine))
            figures[f"{precision} {kind.__name__}"] = dict(zip(("losses", "weights"), apart, strict=True))
            if not max(apart) <= APART[POLICIES[precision].compute]:
                wrong.append(f"{precision} {kind.__name__} ({max(apart):.1e})")
    if wrong:
        raise Failed(f"{name} ends away from plain PyTorch under {', '.join(wrong)}", figures)
    return figures


def _data(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(16, 64, generator=generator).to(device), torch.randn(16, 8, generator=generator).to(device))
        for _ in range(8)
    ]


def _ours(name: str, precision: str, make: Any, machine: Machine) -> tuple[list[float], dict[str, torch.Tensor]]:
    options = dict(Kind(name, options={"tensor_parallel_size": 1} if name == "tp" else {}).options)
    strategy = get_strategy(name, accelerator=machine.device, devices=1, precision=precision, **options)
    strategy.setup_environment()
    losses = []
    try:
        torch.manual_seed(0)
        model: Any = Small()
        optimizer = make(model.parameters())
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for batch in _data(machine.device):
            loss = model(*batch)
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses, strategy.module_state_dict(model)
    finally:
        strategy.teardown()
        free(machine)


def _plain(precision: str, make: Any, machine: Machine) -> tuple[list[float], dict[str, torch.Tensor]]:
    table = POLICIES[precision]
    compute, held = getattr(torch, table.compute), getattr(torch, table.parameter)
    torch.manual_seed(0)
    model = Small().to(machine.device, held)
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler(machine.device, enabled=table.scaled)
    losses = []
    for batch in _data(machine.device):
        with torch.autocast(machine.device, compute) if table.autocast else contextlib.nullcontext():
            loss = model(*(each.to(held) for each in batch))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def _apart(
    ours: tuple[list[float], dict[str, torch.Tensor]], plain: tuple[list[float], dict[str, torch.Tensor]]
) -> tuple[float, float]:
    """Return the largest relative difference of losses, and that of all weights as one vector."""
    losses = max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours[0], plain[0], strict=True))
    mine, theirs = (torch.cat([each[1][name].double().flatten() for name in plain[1]]) for each in (ours, plain))
    return losses, float((mine - theirs).norm() / theirs.norm())
