"""``ddp`` steps with averaged gradients or not at all, also where a loss does not reach every parameter."""

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core._versions import has_hooks
from shard_core.errors import InvalidOption, SetupError
from shard_core.strategies.plugin import DDP
from shard_core.testing import models, oracle
from shard_core.testing.strategy_under_test import Subject
from shard_core.testing.suites.training.runs import assert_like, plainly, train
from shard_core.testing.training import set_up


def decaying(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.5)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_an_option_lets_parameters_be_unused(worlds: Any, option: str) -> None:
    truth = plainly("unused", decaying, 4)
    runs = worlds(2).run(train, Subject(name="ddp", options={option: True}), "unused", decaying, 4)
    assert_like(runs, truth)
    unused = {name: tensor for name, tensor in truth.weights.items() if name.startswith("unused.")}
    oracle.assert_same_weights({name: runs[0].weights[name] for name in unused}, unused, 0)


def first_backward(deferred: bool) -> str:
    """Run one backward that leaves parameters out, then one that must not be deferred."""
    with get_strategy("ddp") as strategy:
        model, _ = set_up(strategy, "unused", "sgd")
        (batch,) = models.batches("unused", 1, 6)
        share = models.share_of(strategy, batch)
        if deferred:
            with strategy.no_backward_sync(model):
                strategy.backward(model(*share), model)
        try:
            strategy.backward(model(*share), model)
        except SetupError as error:
            return str(error)
        return "no error"


def leave_out_what_was_used() -> str:
    with get_strategy("ddp", static_graph=True) as strategy:
        model = strategy.setup_module(TwoHeads())
        strategy.backward(squares(model(torch.ones(2, 6))), model)
        try:
            strategy.backward(model(torch.ones(2, 6))[0].sum(), model)
        except SetupError as error:
            return str(error)
        return "no error"


def test_a_graph_that_is_not_static_is_refused_before_a_step(worlds: Any) -> None:
    for message in worlds(2).run(leave_out_what_was_used):
        assert "this loss reached 4 of them where the first one reached 6" in message


@pytest.mark.parametrize("deferred", [False, True])
def test_unused_parameters_are_named_before_a_step(worlds: Any, deferred: bool) -> None:
    for message in worlds(2).run(first_backward, deferred):
        assert "did not reach 2 of them, first 'unused.weight'" in message
        assert "requires_grad_(False)" in message
        assert "inside no_backward_sync if all of them together reach every one" in message
        assert "find_unused_parameters=True" in message


class TwoHeads(nn.Module):
    """Gives two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.trunk(inputs))
        return self.left(hidden), self.right(hidden)


def squares(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat(outputs, 1).square().mean()


def sines(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat(outputs, 1).sin().mean()


def forwards_first(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    first, second = (squares(model(half)) for half in inputs.chunk(2))
    backward(first)
    backward(second * 0.5)


def last_forward_first(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    first, second = (squares(model(half)) for half in inputs.chunk(2))
    backward(second)
    backward(first * 0.5)


def one_loss_twice(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    loss = squares(model(inputs))
    backward(loss, retain_graph=True)
    backward(loss)


def two_losses(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    outputs = model(inputs)
    backward(squares(outputs), retain_graph=True)
    backward(sines(outputs))


def a_look_between(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    first, second = (squares(model(half)) for half in inputs.chunk(2))
    backward(first)
    with torch.no_grad():
        model(inputs)
    backward(second)


def backward_outside(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    with deferred():
        loss = squares(model(inputs))
    backward(loss)


def backward_inside(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    first = squares(model(inputs))
    with deferred():
        backward(sines(model(inputs)))
    backward(first)


def a_head_for_each_rank(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    with deferred():
        loss = model(inputs)[rank % 2].square().mean()
    backward(loss)


def unwrapped(model: Any) -> Any:
    return getattr(model, "module", model)


def a_method(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    backward(squares(unwrapped(model).forward(inputs)))


def methods_alone(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    first, second = inputs.chunk(2)
    with deferred():
        backward(unwrapped(model).trunk(first).square().mean())
    backward(unwrapped(model).trunk(second).sin().mean())


def a_method_first(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    outputs = model(inputs)
    backward(unwrapped(model).trunk(inputs).square().mean())
    backward(squares(outputs))


def a_method_last(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    hidden = unwrapped(model).trunk(inputs)
    backward(squares(model(inputs)))
    backward(hidden.square().mean())


def a_method_besides(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    first, second = inputs.chunk(2)
    backward(squares(model(first)) + unwrapped(model).trunk(second).square().mean())


def a_penalty(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    backward(sum(parameter.square().sum() for parameter in model.parameters()) * (1 + rank))


def a_method_that_reaches_all_on_one_rank(
    model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any
) -> None:
    outputs = unwrapped(model).forward(inputs)
    backward(squares(outputs) if rank == 0 else outputs[1].square().mean())


def a_forward_inside_that_reaches_all_on_one_rank(
    model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any
) -> None:
    with deferred():
        outputs = model(inputs)
    backward(squares(outputs) if rank == 0 else outputs[1].square().mean())


def a_loss_nobody_follows(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    model(inputs)
    backward(squares(model(inputs)))


def a_head_after_both(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    first, second = inputs.chunk(2)
    backward(squares(model(first)))
    backward(model(second)[0].square().mean())


def a_head_on_each_side(model: Any, rank: int, inputs: torch.Tensor, backward: Any, deferred: Any) -> None:
    first, second = inputs.chunk(2)
    with deferred():
        backward(model(first)[0].square().mean())
    backward(model(second)[1].square().mean())


LOOPS = [forwards_first, last_forward_first, one_loss_twice, two_losses, a_look_between, backward_inside]
METHODS = [a_method, methods_alone, a_method_first, a_method_last, a_method_besides, a_penalty, a_loss_nobody_follows]
UNLIKE = [a_method_that_reaches_all_on_one_rank, a_forward_inside_that_reaches_all_on_one_rank]
HEADS = [a_head_after_both, a_head_on_each_side]
MOVING = [*LOOPS, *METHODS, *UNLIKE, *HEADS, backward_outside, a_head_for_each_rank]
CASES = [
    ({}, MOVING),
    ({"gradient_as_bucket_view": False}, [*LOOPS, *HEADS]),
    ({"find_unused_parameters": True}, MOVING),
    ({"static_graph": True}, [each for each in MOVING if each not in HEADS]),
]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, one: Callable[[torch.Tensor], Any]) -> Any:
    """Take three steps; return the gradients of each, and the weights they lead to."""
    seen = []
    for batch, _ in models.batches("plain", 3, 24):
        one(batch)
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return seen, model.state_dict()


def plain_steps(loop: Any, ranks: int) -> Any:
    """Run all ranks' backwards in one process, each counting one part of the mean."""
    torch.manual_seed(0)
    model = TwoHeads()

    def one(batch: torch.Tensor) -> None:
        for rank, share in enumerate(batch.chunk(ranks)):
            loop(model, rank, share, lambda loss, **how: (loss / ranks).backward(**how), contextlib.nullcontext)

    return steps(model, torch.optim.SGD(model.parameters(), lr=0.1), one)


def steps_under_ddp(cases: Any) -> Any:
    """Take the steps of each loop with each set of options."""
    results = []
    for options, loops in cases:
        for loop in loops:
            with get_strategy("ddp", **options) as strategy:
                torch.manual_seed(0)
                made = TwoHeads()
                optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
                model, _ = strategy.setup_module_and_optimizers(made, [optimizer])

                def one(batch: torch.Tensor, loop: Any = loop, strategy: Any = strategy, model: Any = model) -> None:
                    share = models.share_of(strategy, (batch,))[0]
                    backward = functools.partial(strategy.backward, module=model)
                    loop(model, strategy.global_rank, share, backward, lambda: strategy.no_backward_sync(model))

                results.append((loop.__name__, options, steps(made, optimizer, one)))
    return results


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_every_backward_is_averaged_whatever_its_place_among_forwards(worlds: Any, ranks: int) -> None:
    truths = {loop.__name__: plain_steps(loop, ranks) for loop in MOVING}
    for results in worlds(ranks).run(steps_under_ddp, CASES):
        for loop, options, result in results:
            where = f"{loop} with {options}: "
            torch.testing.assert_close(result, truths[loop], rtol=1e-5, atol=1e-7, msg=where.__add__)


def through_both(first: Any, second: Any, backward: Any, inputs: torch.Tensor) -> None:
    """Send one loss through two modules twice, and after it one of the second alone, whose forward came before."""
    earlier = squares(second(inputs))
    loss = squares(second(first(inputs)))
    backward(loss, second, retain_graph=True)
    backward(loss, first)
    backward(earlier, second)


def halves() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(6, 6), TwoHeads()


def gradients(*modules: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def gradients_of_both(options: dict[str, Any]) -> list[torch.Tensor | None]:
    with get_strategy("ddp", **options) as strategy:
        first, second = halves()
        ready = [strategy.setup_module(first), strategy.setup_module(second)]
        ((batch, _),) = models.batches("plain", 1, 12)
        through_both(*ready, strategy.backward, *models.share_of(strategy, (batch,)))
        return gradients(first, second)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_a_loss_through_two_modules_is_averaged_in_both(worlds: Any, options: dict[str, Any]) -> None:
    first, second = halves()
    ((batch, _),) = models.batches("plain", 1, 12)
    for share in batch.chunk(2):
        through_both(first, second, lambda loss, module, **how: (loss / 2).backward(**how), share)
    for each in worlds(2).run(gradients_of_both, options):
        torch.testing.assert_close(each, gradients(first, second), rtol=1e-5, atol=1e-7)


def test_teardown_leaves_no_hooks_on_parameters() -> None:
    with get_strategy("ddp", accelerator="cpu", find_unused_parameters=True) as strategy:
        module = nn.Linear(2, 1)
        strategy.setup_module(module)
        assert has_hooks(module.bias)
    assert not any(map(has_hooks, module.parameters()))


def trained_twice(made: nn.Module) -> list[torch.Tensor]:
    """Train a module under one strategy that is entered twice, the wrappers kept; return its weights."""
    strategy, kept = get_strategy("ddp", accelerator="cpu", devices=1), []
    for _ in range(2):
        with strategy:
            optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
            model, _ = strategy.setup_module_and_optimizers(made, [optimizer])
            kept.append(model)
            for batch, _ in models.batches("plain", 2, 12):
                strategy.backward(squares(model(batch)), model)
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
    pickle.dumps(strategy)  # as launch() does where it starts ranks
    return list(made.parameters())


def test_a_strategy_that_was_left_holds_nothing_of_its_modules() -> None:
    torch.manual_seed(0)
    made = TwoHeads()
    truth = copy.deepcopy(made)
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
    for _ in range(2):
        for batch, _ in models.batches("plain", 2, 12):
            squares(truth(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(trained_twice(made), list(truth.parameters()))


def test_messages_worth_trying_fit_the_model() -> None:
    strategy, model = get_strategy("ddp"), nn.Linear(1000, 2000)  # 7.6 MiB of gradients
    proposals = strategy.engine_worth_trying(model, 2)
    assert next(proposals) == [{"bucket_cap_mb": 1}, {"bucket_cap_mb": 5}]  # of 25 MiB there is one already
    best = {"bucket_cap_mb": 1}
    assert proposals.send(best) == [{"bucket_cap_mb": 1, "gradient_as_bucket_view": False}]
    assert next(get_strategy("ddp", bucket_cap_mb=1).engine_worth_trying(model, 2))[-1] == {"bucket_cap_mb": 8}
    assert list(strategy.engine_worth_trying(model, 1)) == []


def past_the_strategy(how: str) -> str:
    """Run a backward that leaves gradients on their rank without the strategy's knowledge, then step."""
    with get_strategy("ddp") as strategy:
        model, optimizer = set_up(strategy, "plain", "sgd")
        (batch,) = models.batches("plain", 1, 6)
        loss = model(*models.share_of(strategy, batch))
        try:
            if how == "loss.backward":
                loss.backward()
            elif how == "no_sync":
                with model.no_sync():  # type: ignore[operator]
                    strategy.backward(loss, model)
            else:
                model.require_backward_grad_sync = False  # type: ignore[assignment]
                strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
        except SetupError as error:
            return str(error)
        return "replicas drift apart, and nobody says so"


@pytest.mark.parametrize("how", ["loss.backward", "no_sync", "require_backward_grad_sync"])
def test_gradients_that_were_left_on_their_rank_are_not_stepped_with(worlds: Any, how: str) -> None:
    for message in worlds(2).run(past_the_strategy, how):
        assert ("strategy.backward(loss, model)" if how == "loss.backward" else "require_backward_grad_sync") in message


@pytest.mark.parametrize("word", DDP.refused)
def test_words_from_elsewhere_are_answered(word: str) -> None:
    with pytest.raises(InvalidOption) as error:
        get_strategy("ddp", **{word: 1})
    assert str(error.value) == f"strategy 'ddp' takes no {word!r}: {DDP.refused[word]}."
