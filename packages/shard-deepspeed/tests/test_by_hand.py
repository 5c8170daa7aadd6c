"""What users do to a module's own parameters and gradients counts as in plain PyTorch, or is refused."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scaled import Scaled
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, step, whole_weights

_STEPS, _BATCH = 4, 12
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
}


class Plain:
    """One process, and torch's own calls where a strategy has its own."""

    def backward(self, loss: torch.Tensor, model: nn.Module, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def no_backward_sync(self, model: nn.Module, enabled: bool) -> Any:
        return contextlib.nullcontext()


def halve(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def clamp_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def exchange_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def average(model: Any) -> None:
    """Evaluate other values, and put the old ones back."""
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    with torch.no_grad():
        model(*models.batches("plain", 1, _BATCH)[0])
    for parameter, values in zip(model.parameters(), kept, strict=True):
        parameter.data = values


def load(model: Any) -> None:
    model.load_state_dict({name: torch.full_like(value, 0.3) for name, value in model.state_dict().items()})


def rescale_gradients(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
            parameter.grad /= torch.tensor(3.0)


def clamp_gradients(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.nan_to_num_().clamp_(-0.02, 0.02)
            parameter.grad.add_(0.001).neg_()
    model.second.bias.grad.fill_(0.01)


def assign_gradients(model: Any) -> None:
    kept = model.first.bias.grad
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = 0.5 * parameter.grad
            parameter.grad = torch.nan_to_num(parameter.grad / torch.tensor(3.0)).clamp(-0.02, 0.02) - 0.001
            parameter.grad.mul_(2)
    kept.mul_(100)  # which nothing holds any more


def zero(model: Any) -> None:
    model.zero_grad()


def zero_in_place(model: Any) -> None:
    model.zero_grad(set_to_none=False)


def zero_one_layer(model: Any) -> None:
    model.first.zero_grad()


def drop(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def nothing(model: Any) -> None:
    pass


EDITS = {each.__name__: each for each in (halve, clamp_data, exchange_data, average, load, nothing)}
TOUCHES = (rescale_gradients, clamp_gradients, assign_gradients, zero_one_layer, nothing)
GRADIENTS = {each.__name__: each for each in TOUCHES}
ZEROS = {each.__name__: each for each in (zero, zero_in_place, drop)}


def loop(strategy: Any, model: Any, optimizer: Any, share: Any, hands: tuple[str, str, str]) -> None:
    """Train; touch gradients after a backward, zero them by the module, and touch values after a step."""
    gradients, zeros, edit = hands
    for number, batch in enumerate(models.batches("plain", _STEPS, _BATCH)):
        loss = model(*share(batch))
        if number == 1:  # thrown away without a step, between a forward and its backward
            strategy.backward(loss, model)
            loss = model(*share(batch)) * 2
            ZEROS[zeros](model)
        strategy.backward(loss, model)
        if number != 2:
            GRADIENTS[gradients](model)
        if number == 1:  # added to what was touched
            strategy.backward(model(*share(batch)), model)
        strategy.optimizer_step(optimizer)
        ZEROS[zeros](model)
        if number < _STEPS - 1:
            EDITS[edit](model)
            strategy.backward(model(*share(batch)), model)  # in between, and thrown away
            ZEROS[zeros](model)


def plain(optimizer: str, hands: tuple[str, str, str]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Scaled()
    loop(Plain(), model, _OPTIMIZERS[optimizer](model.parameters()), lambda batch: batch, hands)
    return model.state_dict()


def by_hand(stage: int, optimizer: str, hands: list[tuple[str, str, str]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for each in hands:
        with get_strategy("deepspeed", stage=stage) as strategy:
            model, made = set_up(strategy, Scaled, lambda module: _OPTIMIZERS[optimizer](module.parameters()))
            loop(strategy, model, made, lambda batch, on=strategy: models.share_of(on, batch), each)
            found.append(whole_weights(strategy, model))
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_done_to_a_module_counts(worlds: Any, stage: int, optimizer: str) -> None:
    hands = [("nothing", "zero", edit) for edit in EDITS]
    hands += [("rescale_gradients", "zero_in_place", "nothing"), ("zero_one_layer", "drop", "nothing")]
    hands += [("clamp_gradients", "zero", "nothing"), ("assign_gradients", "zero", "nothing")]
    for rank in worlds(2).run(by_hand, stage, optimizer, hands):
        for each, weights in zip(hands, rank, strict=True):
            oracle.assert_same_weights(weights, plain(optimizer, each), 1e-5)


def bfloat16(stage: int, persistent: int) -> list[dict[str, torch.Tensor]]:
    """Halve one parameter; the float32 values of the others stay what they were, bit by bit."""
    options: dict[str, Any] = {"param_persistence_threshold": persistent} if stage == 3 else {}
    with get_strategy("deepspeed", stage=stage, precision="bf16-true", **options) as strategy:
        model, optimizer = set_up(strategy, Scaled, lambda module: _OPTIMIZERS["adamw"](module.parameters()))
        for batch in models.batches("plain", 2, _BATCH):
            step(strategy, model, optimizer, batch)
        before = whole_weights(strategy, model)
        with gathered(stage, persistent, [model.first.weight]), torch.no_grad():
            model.first.weight.mul_(0.5)
        return [before, whole_weights(strategy, model)]


def gathered(stage: int, persistent: int, parameters: list[Any]) -> Any:
    if stage < 3 or persistent:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


@pytest.mark.parametrize(("stage", "persistent"), [(1, 0), (3, 0), (3, 1000)])
def test_float32_copies_take_what_was_written_and_keep_the_rest(worlds: Any, stage: int, persistent: int) -> None:
    for before, after in worlds(2).run(bfloat16, stage, persistent):
        assert not torch.equal(before["first.weight"], before["first.weight"].bfloat16().float())
        halved = {**before, "first.weight": (before["first.weight"].bfloat16() * 0.5).float()}
        oracle.assert_same_weights(after, halved, 0.0)


def write(model: Any, where: str) -> None:
    with torch.no_grad():
        for parameter in [model.factor] if where == "factor" else model.second.parameters():
            parameter.mul_(0.5)


def away(cure: bool, where: str) -> Any:
    with get_strategy("deepspeed_stage_3", param_persistence_threshold=0) as strategy:
        model, optimizer = set_up(strategy, Scaled, lambda module: _OPTIMIZERS["sgd"](module.parameters()))
        batches = models.batches("plain", 2, _BATCH)
        step(strategy, model, optimizer, batches[0])
        with gathered(3, 0, list(model.second.parameters())) if cure else contextlib.nullcontext():
            write(model, where)
        if cure:
            step(strategy, model, optimizer, batches[1])
            return whole_weights(strategy, model)
        with pytest.raises(SetupError) as error:
            model(*models.share_of(strategy, batches[1]))
        return str(error.value)


@pytest.mark.parametrize("where", ["second.weight", "factor"])  # in a submodule, and in the module itself
def test_writing_to_what_is_spread_over_ranks_is_refused_with_the_cure(worlds: Any, where: str) -> None:
    for message in worlds(2).run(away, False, where):
        assert f"{where!r} was written to" in message
        assert "GatheredParameters" in message


def test_the_cure_of_writing_to_what_is_spread_over_ranks(worlds: Any) -> None:
    torch.manual_seed(0)
    model = Scaled()
    optimizer = _OPTIMIZERS["sgd"](model.parameters())
    for number, batch in enumerate(models.batches("plain", 2, _BATCH)):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
        if not number:
            write(model, "second.weight")
    for weights in worlds(2).run(away, True, "second.weight"):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)


def assign_gradient(strategy: Any, model: Any, optimizer: Any) -> None:
    model.first.weight.grad = torch.ones_like(model.first.weight)
    strategy.optimizer_step(optimizer)


def assign_first(strategy: Any, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    assign_gradient(strategy, model, optimizer)


def read_gradient(strategy: Any, model: Any, optimizer: Any) -> None:
    model.first.weight.grad.sum()


def backward_around(strategy: Any, model: Any, optimizer: Any) -> None:
    model(*models.batches("plain", 1, _BATCH)[0]).backward()


def hook_part(strategy: Any, model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][0].register_hook(lambda gradient: gradient)
    strategy.backward(model(*models.share_of(strategy, models.batches("plain", 1, _BATCH)[0])), model)


def refused(stage: int, hands: list[Any]) -> list[str]:
    messages = []
    for hand in hands:
        with get_strategy("deepspeed", stage=stage) as strategy:
            model, optimizer = set_up(strategy, Scaled, lambda module: _OPTIMIZERS["sgd"](module.parameters()))
            strategy.backward(model(*models.share_of(strategy, models.batches("plain", 1, _BATCH)[0])), model)
            assert "stand in the parts" in repr(model.first.bias.grad)
            with pytest.raises(SetupError) as error:
                hand(strategy, model, optimizer)
            messages.append(str(error.value))
    return messages


HANDS = [assign_gradient, read_gradient, backward_around, assign_first, hook_part]


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_are_not_there_are_refused(worlds: Any, stage: int) -> None:
    for messages in worlds(2).run(refused, stage, HANDS):
        assert "put into .grad of 'first.weight'" in messages[0]
        assert "strategy.clip_gradients_norm" in messages[1]
        assert "strategy.backward" in messages[2]
        assert messages[3] == messages[0]
        assert "register it on the module's parameter" in messages[4]


def deferred(strategy: Any, model: Any, optimizer: Any, share: Any) -> None:
    for batch in models.batches("plain", 3, _BATCH):
        with strategy.no_backward_sync(model, enabled=True):
            strategy.backward(model(*share(batch)) * 3, model)
            model.zero_grad()
            strategy.backward(model(*share(batch)), model)
            rescale_gradients(model)
        strategy.backward(model(*share(batch)), model)
        strategy.optimizer_step(optimizer)
        model.zero_grad()


def defer() -> dict[str, torch.Tensor]:
    with get_strategy("deepspeed_stage_1") as strategy:
        model, optimizer = set_up(strategy, Scaled, lambda module: _OPTIMIZERS["sgd"](module.parameters()))
        deferred(strategy, model, optimizer, lambda batch: models.share_of(strategy, batch))
        return whole_weights(strategy, model)


def test_deferred_gradients_are_thrown_away_with_the_modules(worlds: Any) -> None:
    torch.manual_seed(0)
    model = Scaled()
    deferred(Plain(), model, _OPTIMIZERS["sgd"](model.parameters()), lambda batch: batch)
    for weights in worlds(2).run(defer):
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)


def denominators(stage: int) -> dict[str, torch.Tensor]:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, optimizer = set_up(strategy, Scaled, lambda module: _OPTIMIZERS["sgd"](module.parameters()))
        for number, batch in enumerate(models.batches("plain", 2, _BATCH)):
            inputs, targets = models.share_of(strategy, batch)
            strategy.backward(model(inputs, targets) * targets.numel(), model, denominator=targets.numel())
            if number == 0:
                model.zero_grad()
        strategy.optimizer_step(optimizer)
        return whole_weights(strategy, model)


@pytest.mark.parametrize("stage", [1, 3])
def test_denominators_go_with_the_gradients(worlds: Any, stage: int) -> None:
    truth = oracle.train(
        Scaled, lambda module: _OPTIMIZERS["sgd"](module.parameters()), models.batches("plain", 2, _BATCH)[1:]
    )
    for weights in worlds(2).run(denominators, stage):
        oracle.assert_same_weights(weights, truth.weights, 1e-5)


def grow(strategy: Any, model: Any, optimizer: Any, share: Any) -> None:
    for number, batch in enumerate(models.batches("plain", _STEPS, _BATCH)):
        if number == 2:
            optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.3})
            optimizer.zero_grad(set_to_none=False)
        strategy.backward(model(*share(batch)), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()


def grown(stage: int, optimizer: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model, made = set_up(strategy, Scaled, lambda module: _OPTIMIZERS[optimizer](module.first.parameters()))
        grow(strategy, model, made, lambda batch: models.share_of(strategy, batch))
        return whole_weights(strategy, model), list(strategy.optimizer_state_dict(made).get("state", ()))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_group_of_parameters_may_be_added_after_setup(worlds: Any, stage: int, optimizer: str) -> None:
    torch.manual_seed(0)
    model = Scaled()
    grow(Plain(), model, _OPTIMIZERS[optimizer](model.first.parameters()), lambda batch: batch)
    answers = worlds(2).run(grown, stage, optimizer)
    for weights, _ in answers:
        oracle.assert_same_weights(weights, model.state_dict(), 1e-5)
    assert sorted(answers[0][1]) == ["first.bias", "first.weight", "second.bias", "second.weight"]


def penalized(model: Any, batch: Any) -> torch.Tensor:
    return model(*batch) + 0.05 * sum(parameter.pow(2).sum() for parameter in model.parameters())


def penalize(stage: int) -> Any:
    options: dict[str, Any] = {"param_persistence_threshold": 0} if stage == 3 else {}
    with get_strategy("deepspeed", stage=stage, **options) as strategy:
        model, optimizer = set_up(strategy, Scaled, lambda module: _OPTIMIZERS["sgd"](module.parameters()))
        for batch in models.batches("plain", _STEPS, _BATCH):
            loss = penalized(model, models.share_of(strategy, batch))
            if stage == 3:
                with pytest.raises(SetupError) as error:
                    strategy.backward(loss, model)
                return str(error.value)
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return whole_weights(strategy, model)


def test_a_penalty_by_hand_counts_where_parameters_are_whole(worlds: Any) -> None:
    truth = oracle.train(
        Scaled,
        lambda module: _OPTIMIZERS["sgd"](module.parameters()),
        models.batches("plain", _STEPS, _BATCH),
        loss_of=penalized,
    )
    for weights in worlds(2).run(penalize, 1):
        oracle.assert_same_weights(weights, truth.weights, 1e-5)
    for message in worlds(2).run(penalize, 3):
        assert "weight_decay" in message
