"""Where only forward is watched, what comes in by another door is refused, and nothing else is."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from shard_core import get_strategy
from shard_core.capability import Capability
from shard_core.errors import MissingCapability
from shard_core.strategies.ddp import DDPStrategy
from shard_core.strategies.plugin import DDP

INPUT = torch.linspace(-1, 1, 12).view(4, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(3, 3))
        self.second = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        if fail:
            raise ValueError("as asked")
        return checkpoint(self.body, x, use_reentrant=False).mean()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class OnlyForward(DDPStrategy):
    """A strategy whose modules may be called as a whole alone."""

    default_info = dataclasses.replace(DDP, capabilities=DDP.capabilities - {Capability.ENTRY_METHODS})


@pytest.fixture
def ready() -> Any:
    with OnlyForward(accelerator="cpu") as strategy:
        module = Model()
        module, _ = strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), lr=0.1)])
        yield strategy, module, strategy.unwrap(module)


def test_a_method_is_refused_with_the_cure(ready: Any) -> None:
    _, module, mine = ready
    module(INPUT)
    with pytest.raises(
        MissingCapability, match=r"a .*Linear inside Model was called, but not from the forward of the"
    ) as e:
        mine.body(INPUT)
    assert "use torch.no_grad() where no gradient is wanted" in str(e.value)


def test_recomputation_in_backward_is_no_entry(ready: Any) -> None:
    strategy, module, _ = ready
    strategy.backward(module(INPUT), module)


def test_without_gradients_whole_parameters_may_be_used(ready: Any) -> None:
    with torch.no_grad():
        assert ready[2].body(INPUT).shape == (4, 1)


def test_looking_at_a_parametrized_weight_is_no_call(ready: Any) -> None:
    assert ready[2].first.weight.shape == (3, 3)


def test_a_copy_is_free(ready: Any) -> None:
    assert copy.deepcopy(ready[2]).body(INPUT).shape == (4, 1)


def test_a_forward_that_failed_is_over(ready: Any) -> None:
    _, module, mine = ready
    with pytest.raises(ValueError, match="as asked"):
        module(INPUT, fail=True)
    with pytest.raises(MissingCapability):
        mine.body(INPUT)
    module(INPUT)


def test_after_teardown_the_module_is_the_users_again(ready: Any) -> None:
    strategy, _, mine = ready
    strategy.teardown()
    assert mine.body(INPUT).shape == (4, 1)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_module_that_is_compiled_in_place_runs_in_the_precision(strategy: str, after: bool) -> None:
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        del inputs
        graphs.append(graph)
        return graph.forward

    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    made = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.bfloat16):
        truth = plain(INPUT)
    with get_strategy(strategy, accelerator="cpu", precision="bf16-mixed") as chosen:
        if not after:
            made.compile(backend=backend)
        module, _ = chosen.setup_module_and_optimizers(made, [torch.optim.SGD(made.parameters(), lr=0.1)])
        if after:
            module.compile(backend=backend)
        output = module(INPUT)
        assert torch.equal(output, truth)
        assert not torch.is_autocast_enabled("cpu")
        layers = [str(node.target) for graph in graphs for node in graph.graph.nodes]
        if Version(torch.__version__) >= Version("2.13"):  # 2.9 runs what a hook's graph break is in as it is
            assert sum("linear" in each for each in layers) == 2, layers
    torch.compiler.reset()
