"""Optional promises about modules: what is declared works, what is not is refused."""

from __future__ import annotations

import functools
import json
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from shard_core.capability import Capability
from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH, Run, assert_like, plainly, train_on
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS = 3
_MIB = 2**20
_LAYERS = 32
"""Of a MiB each, in the model that no rank may hold whole."""

Weights = dict[str, torch.Tensor]


class Capabilities(Suite):
    """Optional promises about modules: what is declared works, what is not is refused."""

    @promise(needs=Capability.INFERENCE, after=("same_seed_same_weights",))
    def test_inference_without_optimizer(self, ranks: Ranks) -> None:
        """A module set up alone gives the outputs of plain PyTorch.

        Usual cause:
            The engine is only started along with an optimizer.
        """
        torch.manual_seed(0)
        plain = models.make("plain").eval()
        with torch.no_grad():
            whole = plain(*models.batches("plain", 1, BATCH)[0], reduction="none")
        for rank, (data_rank, replicas, output) in enumerate(ranks.run(infer)):
            (share,) = models.share((whole,), data_rank, replicas)
            assert torch.allclose(output, share, rtol=1e-5, atol=1e-6), f"rank {rank} computes something else"

    @promise(needs=Capability.ENTRY_METHODS, after=("averages_gradients",))
    def test_entry_methods_run(self, ranks: Ranks) -> None:
        """A loss may come from a method of the module other than forward; its gradients are averaged all the same.

        Usual cause:
            The engine gathers parameters or waits for gradients in forward only. Then the capability must not be
            declared, and core refuses such calls.
        """
        truth = _plain_step()
        for weights in ranks.run(train_through_a_method):
            oracle.assert_same_weights(weights, truth, 1e-6)

    @pytest.mark.parametrize("how", ["torch.compile", "in place"])
    @promise(needs=Capability.COMPILE, after=("averages_gradients",), every_size=False)
    def test_compiled_modules_train(self, ranks: Ranks, how: str) -> None:
        """A module that was compiled before setup trains as it would uncompiled, under its own parameter names.

        Usual cause:
            The wrapper's prefix gets into the names, or the engine's hooks are compiled away.
        """
        assert_like(ranks.run(train_compiled, how, timeout=180.0), plainly("plain", "sgd", _STEPS))

    @promise(needs=Capability.META_INIT, every_size=False)
    def test_no_rank_builds_all(self, ranks: Ranks) -> None:
        """While a module is built in the context and set up, no rank of several ever holds all of its parameters.

        Usual cause:
            The context builds as plain PyTorch does, or setup fills whole parameters before it shards them.
        """
        for rank, (whole, peak) in enumerate(ranks.run(build_within)):
            assert whole > 0.9 * _LAYERS * _MIB, f"the module has {whole} bytes of parameters"
            assert ranks.size == 1 or peak < 0.75 * whole, (
                f"rank {rank} holds up to {peak / _MIB:.0f} MiB while it builds {whole / _MIB:.0f} MiB of parameters"
            )

    @promise(needs=Capability.CPU_OFFLOAD, after=("averages_gradients",))
    def test_offloads_to_host_memory(self, ranks: Ranks) -> None:
        """With ``cpu_offload=True`` parameters and optimizer state stay in host memory between uses, training as else.

        Usual cause:
            They are offloaded once and stay on the device after the first step.
        """
        answers = ranks.run(train_offloaded)
        assert_like([run for run, _ in answers], plainly("plain", "adamw", _STEPS))
        for rank, (_, devices) in enumerate(answers):
            assert devices <= {"cpu"}, f"rank {rank} keeps parameters or optimizer state on {sorted(devices)}"


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def infer(subject: Subject) -> tuple[int, int, torch.Tensor]:
    """Return the data rank, how many there are, and a module's output for this rank's share."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            built = models.make("plain")
        module = strategy.setup_module(built).eval()
        with torch.no_grad():
            output = module(*models.share_of(strategy, models.batches("plain", 1, BATCH)[0]), reduction="none")
        data = strategy.distributed_sampler_kwargs
        return data["rank"], data["num_replicas"], output.cpu()


@functools.cache
def _plain_step() -> Weights:
    return plainly("plain", _sgd, 1).weights


def train_through_a_method(subject: Subject) -> Weights:
    """Take a step whose loss came from ``predict``, and return the weights."""
    with subject.strategy() as strategy:
        module, optimizer = set_up(strategy, "plain", _sgd)
        inputs, targets = models.share_of(strategy, models.batches("plain", 1, BATCH)[0])
        predicted = strategy.unwrap(module).predict(inputs)  # type: ignore[operator]
        strategy.backward(functional.mse_loss(predicted, targets), module)
        strategy.optimizer_step(optimizer)
        return whole_weights(strategy, module)


def _compiled(how: str) -> nn.Module:
    module = models.make("plain")
    if how == "torch.compile":
        return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]
    module.compile(backend="aot_eager")
    return module


def train_compiled(subject: Subject, how: str) -> Run:
    """Train a module that was compiled before setup."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        built = _compiled(how)
        module, (optimizer,) = strategy.setup_module_and_optimizers(built, [models.make_optimizer("sgd", built)])
        return train_on(strategy, module, optimizer, models.batches("plain", _STEPS, BATCH))


def build_within(subject: Subject) -> tuple[int, int]:
    """Return the bytes of a module's parameters, and the most that were held while it was built and set up."""
    with subject.strategy() as strategy:
        with strategy.module_init_context(empty_init=True):
            pass  # what computes every value all the same refuses here
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            with strategy.module_init_context():
                built = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(_LAYERS)))
            strategy.setup_module_and_optimizers(built, [_sgd(built)])
        return sum(parameter.numel() * parameter.element_size() for parameter in built.parameters()), _peak(recorded)


def _peak(recorded: profile) -> int:
    """Add up what was allocated and freed, on the host and on devices, and return the most there was."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    return max(accumulate(size for _, size in changes), default=0)


def train_offloaded(subject: Subject) -> tuple[Run, set[str]]:
    """Train with offloading; return the run, and where parameters and optimizer state are in the end."""
    with subject.strategy(cpu_offload=True) as strategy:
        module, optimizer = set_up(strategy, "plain", "adamw")
        run = train_on(strategy, module, optimizer, models.batches("plain", _STEPS, BATCH))
        state = [value for slots in optimizer.state.values() for value in slots.values()]
        held = [*strategy.unwrap(module).parameters(), *(each for each in state if isinstance(each, torch.Tensor))]
        return run, {tensor.device.type for tensor in held}
