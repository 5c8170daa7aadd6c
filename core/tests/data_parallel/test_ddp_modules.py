"""Modules under DistributedDataParallel without a strategy around them, as another engine would hold them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shard_core import get_strategy
from shard_core._versions import has_hooks
from shard_core.backend import DDPModules


class Boxed:
    """An output that nothing looks into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxing(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.inner.weight, 1.0 + rank)

    def forward(self, inputs: torch.Tensor) -> Boxed:
        return Boxed(self.inner(inputs))


def hold() -> dict[str, Any]:
    """Return the gradients after each backward through a module that is trained, and one that is not yet."""
    with get_strategy("ddp") as strategy:
        rank = strategy.global_rank
        ddp = DDPModules(strategy.root_device, bucket_cap_mb=1)
        made, frozen = Boxing(rank), Boxing(rank).requires_grad_(False)
        model, later = ddp.wrap(made), ddp.wrap(frozen)
        seen: dict[str, Any] = {
            "kinds": (type(model), type(later)),
            "weights": [each.inner.weight.flatten().tolist() for each in (made, frozen)],
        }
        inputs = torch.tensor([[1.0, 2.0]]) * (1 + rank)
        with ddp.no_sync(model):
            ddp.backward(model(inputs).value.sum(), model)
        seen["deferred"] = made.inner.weight.grad.flatten().tolist()
        ddp.backward(model(inputs).value.sum(), model)
        seen["averaged"] = made.inner.weight.grad.flatten().tolist()
        frozen.requires_grad_(True)
        with ddp.no_sync(later):
            ddp.backward(later(inputs).value.sum(), later)
        seen["deferred later"] = frozen.inner.weight.grad.flatten().tolist()
        ddp.backward(later(inputs).value, later, gradient=torch.tensor([[2.0]]))
        seen["averaged later"] = frozen.inner.weight.grad.flatten().tolist()
        ddp.teardown()
        seen["hooks"] = has_hooks(made.inner.weight) or has_hooks(frozen.inner.weight)
        return seen


def sums_after_teardown(monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the sums of a backward of new modules, after one of modules that were left was deferred."""
    with get_strategy("ddp", accelerator="cpu") as strategy:
        ddp = DDPModules(strategy.root_device)
        made, other = nn.Linear(2, 1), nn.Linear(2, 1)
        left = ddp.wrap(made)
        with ddp.no_sync(left):
            ddp.backward(left(torch.ones(1, 2)).sum(), left)
        ddp.teardown()
        model = ddp.wrap(other)
        sums: list[torch.Tensor] = []
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, *args, **kwargs: sums.append(tensor))
        for _ in range(2):
            ddp.backward(model(torch.ones(1, 2)).sum() + made.weight.sum(), model)
        return len(sums)


def test_modules_that_were_left_take_part_in_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sums_after_teardown(monkeypatch) == 0


def test_gradients_are_averaged_when_they_are_not_deferred(worlds: Any) -> None:
    for rank, seen in enumerate(worlds(2).run(hold)):
        assert seen == {
            "kinds": (DistributedDataParallel, Boxing),
            "weights": [[1.0, 1.0], [1.0, 1.0]],
            "deferred": [1.0 + rank, 2.0 + 2 * rank],
            "averaged": [3.0, 6.0],
            "deferred later": [1.0 + rank, 2.0 + 2 * rank],
            "averaged later": [4.5, 9.0],
            "hooks": False,
        }


def compile_with_small_buckets() -> list[float]:
    """Return a compiled module's gradients after a backward, where gradients travel in messages of a few bytes."""
    with get_strategy("ddp", bucket_cap_mb=0.0001) as strategy:
        module = nn.Linear(2, 1, bias=False)
        nn.init.ones_(module.weight)
        module.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        strategy.backward(model(torch.tensor([[1.0, 2.0]]) * (1 + strategy.global_rank)).sum(), model)
        torch.compiler.reset()
        return module.weight.grad.flatten().tolist()


def test_what_is_compiled_may_have_small_buckets(worlds: Any) -> None:
    assert worlds(2).run(compile_with_small_buckets, timeout=100.0) == [[1.5, 3.0]] * 2


def embed(static: bool) -> dict[str, list[float]]:
    """Return gradients where one is sparse between others, which one rank's batch has no part in at all."""
    with get_strategy("ddp", static_graph=static) as strategy:
        module = nn.Sequential(nn.Linear(1, 1), nn.Embedding(3, 1, sparse=True), nn.Linear(1, 1))
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        first, embedding, last = module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.forward = lambda rows, given: last(first(given) + embedding(rows).sum()).sum()  # type: ignore[method-assign]
        model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        rows = [[0, 0], []][strategy.global_rank]
        strategy.backward(model(torch.tensor(rows, dtype=torch.long), torch.ones(1, 1)), model)
        assert embedding.weight.grad.is_sparse
        shown = strategy.module_gradients(model)
        own = {name: each.grad.to_dense().flatten().tolist() for name, each in module.named_parameters()}
        assert not shown or own == {name: each.flatten().tolist() for name, each in shown.items()}
        return own


@pytest.mark.parametrize("static", [False, True])
def test_gradients_beside_a_sparse_one_are_averaged_once(worlds: Any, static: bool) -> None:
    truth = {"0.weight": [1.0], "0.bias": [1.0], "1.weight": [1.0, 0.0, 0.0], "2.weight": [3.0], "2.bias": [1.0]}
    assert worlds(2).run(embed, static) == [truth] * 2


def go_on_after_an_exception(meanwhile: str) -> list[dict[str, list[float]]]:
    """Return the gradients of two backwards after one that an exception ended, while one layer was as it was not."""
    with get_strategy("ddp", find_unused_parameters=True) as strategy:
        module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("first", "second")})
        module["rows"] = nn.Embedding(2, 1, sparse=True)
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        if meanwhile == "trained":
            module["first"].requires_grad_(False)
        module.forward = lambda given: module["second"](module["first"](given) + module["rows"](given.long() * 0))  # type: ignore[method-assign]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        given = torch.full((1, 1), 1.0 + strategy.global_rank)

        def fail(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError(gradient.shape)

        module["first"].requires_grad_(meanwhile == "trained")
        output = model(given)
        output.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            strategy.backward(output.sum(), model)
        module["first"].requires_grad_(True)
        shown = []
        for _ in range(2):
            strategy.backward(model(given).sum(), model)
            shown.append({name: each.grad.to_dense().flatten().tolist() for name, each in module.named_parameters()})
        return shown


@pytest.mark.parametrize("meanwhile", ["frozen", "trained"])
def test_after_an_exception_what_is_averaged_is_what_was_before(worlds: Any, meanwhile: str) -> None:
    once = {"first.weight": [1.5], "second.weight": [2.5], "rows.weight": [1.0, 0.0]}
    twice = {name: [2 * each for each in gradient] for name, gradient in once.items()}
    assert worlds(2).run(go_on_after_an_exception, meanwhile) == [[once, twice]] * 2


def go_on_with_a_static_graph() -> list[list[float]]:
    """Return the gradients of two steps after a backward that an exception ended, the very first."""
    with get_strategy("ddp", static_graph=True) as strategy:
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        given = torch.full((1, 1), 1.0 + strategy.global_rank)

        def fail(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError(gradient.shape)

        output = model(given)
        output.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            strategy.backward(output.sum(), model)
        shown = []
        for _ in range(2):
            strategy.backward(model(given).sum(), model)
            shown.append(module.weight.grad.flatten().tolist())
            optimizer.zero_grad()
        return shown


def test_after_an_exception_gradients_of_a_static_graph_are_averaged(worlds: Any) -> None:
    assert worlds(2).run(go_on_with_a_static_graph) == [[[1.5], [1.5]]] * 2
