"""Setup keeps objects, values and ties, and refuses what it cannot do."""

import copy
import functools
from typing import Any, cast

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.errors import InvalidOption, SetupError
from shard_core.strategies.ddp import DDPStrategy
from shard_core.testing import models


def test_objects_stay_the_same() -> None:
    strategy = get_strategy("single")
    module = models.make("gpt")
    optimizer = models.make_optimizer("sgd", module)
    again, optimizers = strategy.setup_module_and_optimizers(module, [optimizer])
    assert again is module
    assert optimizers == [optimizer]
    assert strategy.unwrap(again) is module
    assert module.head.weight is module.embedding.weight


def test_a_module_is_set_up_once() -> None:
    strategy = get_strategy("single")
    module = strategy.setup_module(nn.Linear(2, 2))
    with pytest.raises(SetupError, match="this Linear was set up already"):
        strategy.setup_module(module)


def test_one_optimizer_belongs_in_a_list() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(InvalidOption, match=r"give a list: setup_module_and_optimizers\(module, \[optimizer\]\)"):
        get_strategy("single").setup_module_and_optimizers(module, torch.optim.SGD(module.parameters(), lr=1.0))


def test_schedulers_need_no_setup() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    given: list[Any] = [optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)]
    with pytest.raises(InvalidOption, match=r"optimizers\[1\] is a LambdaLR; give torch optimizers alone"):
        get_strategy("single").setup_module_and_optimizers(module, given)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"module is 3; give a torch\.nn\.Module"):
        get_strategy("single").setup_module(cast("Any", 3))


@pytest.mark.parametrize("early", [True, False])
def test_an_optimizer_may_come_later(early: bool) -> None:
    strategy = get_strategy("single")
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0) if early else None
    called = strategy.setup_module(module)
    optimizer = strategy.setup_optimizer(optimizer or torch.optim.SGD(module.parameters(), lr=1.0))
    before = module.weight.detach().clone()
    strategy.backward(called(torch.ones(1, 2)).sum(), called)
    assert strategy.optimizer_step(optimizer)
    assert torch.equal(module.weight, before - 1)


def test_what_was_not_set_up_is_refused() -> None:
    strategy = get_strategy("single")
    module = strategy.setup_module(nn.Linear(2, 1))
    stranger = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(stranger.parameters(), lr=1.0)
    loss = stranger(torch.ones(1, 2)).sum()
    with pytest.raises(SetupError, match="this Linear was not set up by this strategy"):
        strategy.backward(loss, stranger)
    with pytest.raises(SetupError, match="this SGD was not set up by this strategy"):
        strategy.optimizer_step(optimizer)
    with pytest.raises(SetupError, match="holds parameters of no module that was set up"):
        strategy.setup_optimizer(optimizer)
    with pytest.raises(SetupError, match=r"of shape \(1, 2\) that the module does not have"):
        strategy.setup_module_and_optimizers(nn.Linear(3, 3), [optimizer])
    assert strategy.unwrap(module) is module


def test_an_optimizer_over_two_modules_is_told_what_to_do() -> None:
    strategy = get_strategy("single")
    first, second = strategy.setup_module(nn.Linear(2, 1)), strategy.setup_module(nn.Linear(2, 1))
    optimizer = torch.optim.Adam([*first.parameters(), second.weight])
    with pytest.raises(SetupError, match="holds 2 parameters of one module and 1 others"):
        strategy.setup_optimizer(optimizer)


def initial_weights_and_masks(strategy_name: str) -> Any:
    with get_strategy(strategy_name) as strategy:
        strategy.seed_everything(3)
        with strategy.module_init_context():
            first = nn.Linear(4, 4)
        first = strategy.setup_module(first)
        mask = nn.functional.dropout(torch.ones(64), 0.5)
        with strategy.module_init_context():
            second = nn.Linear(4, 4)
        second = strategy.setup_module(second)
        weights = [dict(strategy.full_parameters(module))["weight"].clone() for module in (first, second)]
        return weights, mask


def test_same_seed_gives_the_same_weights_and_other_masks(worlds: Any) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(4, 4).weight.detach()
    mask = nn.functional.dropout(torch.ones(64), 0.5)
    second = nn.Linear(4, 4).weight.detach()
    ranks = worlds(3).run(initial_weights_and_masks, "ddp")
    for weights, _ in ranks:
        assert torch.equal(weights[0], plain)
        assert torch.equal(weights[1], second), "rank 0's stream goes on as in one process"
    assert torch.equal(ranks[0][1], mask)
    assert not torch.equal(ranks[0][1], ranks[1][1])
    assert not torch.equal(ranks[1][1], ranks[2][1])


def masks_after_seeding_again(strategy_name: str) -> Any:
    with get_strategy(strategy_name) as strategy:
        strategy.seed_everything(3)
        strategy.setup_module(nn.Linear(4, 4))
        strategy.seed_everything(5)
        mask = nn.functional.dropout(torch.ones(64), 0.5)
        with strategy.module_init_context():
            second = nn.Linear(4, 4)
        return mask, second.weight.detach().clone()


def test_ranks_that_are_seeded_again_draw_other_masks_and_the_same_weights(worlds: Any) -> None:
    torch.manual_seed(5)
    mask, second = nn.functional.dropout(torch.ones(64), 0.5), nn.Linear(4, 4).weight.detach()
    first, *others = worlds(3).run(masks_after_seeding_again, "ddp")
    assert torch.equal(first[0], mask)
    for rank, (drawn, weights) in enumerate(others):
        assert not torch.equal(drawn, mask)
        assert rank == 0 or not torch.equal(drawn, others[0][0])
        assert torch.equal(weights, second)


def frozen_only(strategy_name: str) -> Any:
    with get_strategy(strategy_name) as strategy:
        torch.manual_seed(strategy.global_rank)
        module = nn.Linear(2, 2).requires_grad_(False)
        called = strategy.setup_module(module)
        return called(torch.ones(1, 2))


def test_a_module_without_gradients_is_rank_zeros_everywhere(worlds: Any) -> None:
    first, second = worlds(2).run(frozen_only, "ddp")
    assert torch.equal(first, second)


class Dense(DDPStrategy):
    """A strategy whose engine sends dense gradients alone."""

    engine_takes_sparse_gradients = False


def words() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1))


NOT_ALIKE = pytest.raises(
    SetupError, match=r"the embedding of '0.weight' was made with sparse=True, .* which this SparseAdam is not known to"
)


@pytest.mark.parametrize("late", [False, True])
def test_optimizers_of_sparse_gradients_are_refused_where_an_engine_sends_none(late: bool) -> None:
    module = words()
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=1.0)
    with Dense(accelerator="cpu") as strategy:
        if late:
            strategy.setup_module(module)
            with NOT_ALIKE:
                strategy.setup_optimizer(optimizer)
        else:
            with NOT_ALIKE:
                strategy.setup_module_and_optimizers(module, [optimizer])
            assert module[0].sparse


@pytest.mark.parametrize(("kind", "sparse"), [(Dense, False), (DDPStrategy, True)])
def test_gradients_are_dense_where_an_engine_sends_no_sparse_ones(kind: type[DDPStrategy], sparse: bool) -> None:
    module = words()
    with kind(accelerator="cpu") as strategy:
        called = strategy.setup_module(module)  # without an optimizer, whose step would be checked
        strategy.backward(called(torch.tensor([1])).sum(), called)
        assert module[0].weight.grad.is_sparse == sparse
        optimizer = strategy.setup_optimizer(torch.optim.SGD(module.parameters(), lr=1.0))
        strategy.optimizer_step(optimizer)
    assert module[0].sparse


class Broken(Dense):
    """A strategy whose engine sets nothing up."""

    def engine_setup(self, module: nn.Module, *others: Any) -> nn.Module:
        assert not module[0].sparse
        raise SetupError("no engine")


def test_layers_compute_sparse_gradients_after_a_setup_that_failed() -> None:
    module = words()
    with Broken(accelerator="cpu") as strategy, pytest.raises(SetupError, match="no engine"):
        strategy.setup_module(module)
    assert module[0].sparse


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.AdamW])
def test_a_frozen_embedding_may_be_sparse(kind: type[torch.optim.Optimizer]) -> None:
    module = words()
    module[0].requires_grad_(False)
    with Dense(accelerator="cpu") as strategy:
        strategy.setup_module_and_optimizers(module, [kind(module.parameters(), lr=1.0)])


def test_a_weight_that_is_used_densely_too_may_be_stepped_by_any_optimizer() -> None:
    module = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 3, bias=False))
    module[1].weight = module[0].weight
    with Dense(accelerator="cpu") as strategy:
        strategy.setup_module_and_optimizers(module, [torch.optim.AdamW(module.parameters(), lr=1.0)])


def fitted(module: nn.Module, backward: Any, step: Any, called: nn.Module) -> torch.Tensor:
    def closure() -> torch.Tensor:
        module.zero_grad()
        loss = called(torch.tensor([1, 2])).square().sum()
        backward(loss)
        return loss

    step(closure)
    return module[0].weight.detach().clone()


def test_lbfgs_steps_dense_gradients_as_sparse_ones() -> None:
    torch.manual_seed(0)
    module = words()
    twin = copy.deepcopy(module)
    plain = torch.optim.LBFGS(twin.parameters(), lr=0.1)
    truth = fitted(twin, torch.Tensor.backward, plain.step, twin)
    with Dense(accelerator="cpu") as strategy:
        called, (optimizer,) = strategy.setup_module_and_optimizers(
            module, [torch.optim.LBFGS(module.parameters(), lr=0.1)]
        )
        step = functools.partial(strategy.optimizer_step, optimizer)
        assert torch.allclose(fitted(module, lambda loss: strategy.backward(loss, called), step, called), truth)


@pytest.mark.parametrize("make", [words, lambda: nn.Linear(2, 1)])
@pytest.mark.parametrize("late", [False, True])
def test_state_of_no_parameter_is_left_alone(make: Any, late: bool) -> None:
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.state["step"] = 3  # type: ignore[index]
    optimizer.state[next(module.parameters())]["momentum_buffer"] = torch.eye(3).to_sparse()
    with Dense(accelerator="cpu") as strategy:
        if late:
            strategy.setup_module(module)
            strategy.setup_optimizer(optimizer)
        else:
            strategy.setup_module_and_optimizers(module, [optimizer])
        assert optimizer.state["step"] == 3  # type: ignore[index]
        assert optimizer.state[next(module.parameters())]["momentum_buffer"].is_sparse == (make is not words)
