"""A step means the same everywhere, and bad input gets a sentence."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.errors import InvalidOption, SetupError


def ready(**options: Any) -> Any:
    strategy = get_strategy("single", **options)
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    module, (optimizer,) = strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), lr=0.1)])
    return strategy, module, optimizer


INPUT = torch.linspace(-1, 2, 12).view(4, 3)


@pytest.mark.parametrize(
    ("make_loss", "message"),
    [
        (lambda module: 3.0, "the loss is of type float; give a scalar tensor"),
        (
            lambda module: module(INPUT),
            r"the loss has shape \(4, 1\); reduce it to a scalar, e.g. with .mean\(\), or pass gradient=, ",
        ),
        (lambda module: module(INPUT)[:, :0], r"the loss has shape \(4, 0\); compute it in the module's forward: "),
        (lambda module: module(INPUT).mean().detach(), "the loss has no gradient to follow"),
    ],
)
def test_a_bad_loss_is_refused(make_loss: Any, message: str) -> None:
    strategy, module, _ = ready()
    with pytest.raises(InvalidOption, match=message):
        strategy.backward(make_loss(module), module)


@pytest.mark.parametrize("gradient", [torch.ones(4), torch.ones(1, 4), torch.tensor(1.0)], ids=str)
def test_a_gradient_of_another_shape_is_refused(gradient: torch.Tensor) -> None:
    strategy, module, _ = ready()
    with pytest.raises(
        InvalidOption, match=r"gradient has shape \(.*\), and the loss has shape \(4, 1\); they must be"
    ):
        strategy.backward(module(INPUT), module, gradient=gradient)
    with pytest.raises(InvalidOption, match="gradient is of type list; give a tensor"):
        strategy.backward(module(INPUT), module, gradient=[1.0])


@pytest.mark.parametrize("name", ["single", "ddp"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("denominator", [None, 2.0])
def test_a_gradient_goes_backward_as_in_plain_pytorch(name: str, precision: str, denominator: float | None) -> None:
    torch.manual_seed(0)
    truth, weights = nn.Linear(3, 1), torch.linspace(-1e-4, 2e-4, 4).view(4, 1)
    model = copy.deepcopy(truth)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16, enabled=precision == "16-mixed"):
            outputs = truth(INPUT)
        outputs.backward(gradient=weights.to(outputs.dtype) / (2 * denominator if denominator else 1.0))
    with get_strategy(name, precision=precision) as strategy:
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=1.0)])
        for _ in range(2):
            outputs = model(INPUT)
            strategy.backward(outputs, model, gradient=weights.to(outputs.dtype), denominator=denominator)
        assert strategy.optimizer_step(optimizer)
        with torch.no_grad():
            for mine, plain in zip(model.parameters(), truth.parameters(), strict=True):
                assert plain.grad is not None
                torch.testing.assert_close(mine, plain - plain.grad, rtol=0, atol=1e-6)  # of 3e-4


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"create_graph": True}, "takes no 'create_graph': ranks' gradients are averaged outside of any graph"),
        ({"inputs": [torch.ones(1)]}, "takes no 'inputs': gradients of all parameters are averaged together"),
        ({"retain_grph": True}, "has no option 'retain_grph'; did you mean 'retain_graph'"),
    ],
    ids=str,
)
def test_what_tensors_take_and_an_engine_does_not_is_refused(keywords: dict[str, Any], message: str) -> None:
    with get_strategy("ddp") as strategy:
        module = strategy.setup_module(nn.Linear(3, 1))
        with pytest.raises(InvalidOption, match=f"backward of strategy 'ddp' {message}"):
            strategy.backward(module(INPUT).mean(), module, **keywords)
        strategy.backward(module(INPUT).mean(), module, retain_graph=None, create_graph=False, inputs=None)


def test_single_takes_what_tensors_take() -> None:
    strategy, module, _ = ready()
    strategy.backward(module(INPUT).square().mean(), module, create_graph=True, inputs=[module.weight])
    assert module.weight.grad.requires_grad
    assert module.bias.grad is None


def test_clipping_ends_accumulation_with_denominators() -> None:
    strategy, module, optimizer = ready()
    strategy.backward(module(INPUT).sum(), module, denominator=4)
    strategy.clip_gradients_norm(module, optimizer, 1.0)
    with pytest.raises(SetupError, match=r"backward\(\) after clipping"):
        strategy.backward(module(INPUT).sum(), module, denominator=4)


@pytest.mark.parametrize(("precision", "denominator"), [("32-true", 4), ("16-mixed", None)])
def test_gradients_of_the_last_step_are_not_added_to(precision: str, denominator: int | None) -> None:
    strategy, module, optimizer = ready(precision=precision)
    strategy.backward(1e-4 * module(INPUT).float().sum(), module, denominator=denominator)
    assert strategy.optimizer_step(optimizer)
    with pytest.raises(SetupError, match=r"backward\(\) after optimizer_step\(\) would add"):
        strategy.backward(1e-4 * module(INPUT).float().sum(), module, denominator=denominator)
    for parameter in module.parameters():
        parameter.grad.zero_()
    strategy.backward(1e-4 * module(INPUT).float().sum(), module, denominator=denominator)
    scaled = torch.tensor([4e-4 * (1 if denominator else 65536)])
    torch.testing.assert_close(module.bias.grad, scaled, rtol=1e-3, atol=0)


def test_gradients_zeroed_by_hand_begin_a_step_of_several_backwards() -> None:
    strategy, module, optimizer = ready()
    for _ in range(2):
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for _ in range(2):
            strategy.backward(module(INPUT).sum(), module, denominator=4)
        strategy.optimizer_step(optimizer)
        torch.testing.assert_close(module.bias.grad, torch.ones(1))


def test_gradients_left_on_another_rank_alone_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, module, optimizer = ready()
    strategy.backward(module(INPUT).sum(), module, denominator=4)
    strategy.optimizer_step(optimizer)
    for parameter in module.parameters():
        parameter.grad = None
    monkeypatch.setattr(strategy.collectives, "any_true", lambda mine: True)
    with pytest.raises(SetupError, match=r"backward\(\) after optimizer_step\(\) would add"):
        strategy.backward(module(INPUT).sum(), module, denominator=4)


def test_gradients_add_up_after_clipping_as_in_plain_pytorch() -> None:
    strategy, module, optimizer = ready()
    truth = copy.deepcopy(module)
    for factor in (1.0, 3.0):
        strategy.backward(module(factor * INPUT).mean(), module)
        norm = strategy.clip_gradients_norm(module, optimizer, 0.1)
        truth(factor * INPUT).mean().backward()
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(truth.parameters(), 0.1).item())
    strategy.optimizer_step(optimizer)
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    assert torch.allclose(module.weight, truth.weight)


@pytest.mark.parametrize("name", ["single", "ddp"])
@pytest.mark.parametrize("owner", ["module", "optimizer"])
@pytest.mark.parametrize("to_none", [True, False])
def test_denominators_are_zeroed_with_their_gradients(name: str, owner: str, to_none: bool) -> None:
    torch.manual_seed(0)
    made = nn.Linear(3, 1)
    truth = copy.deepcopy(made)
    with get_strategy(name) as strategy:
        module, (optimizer,) = strategy.setup_module_and_optimizers(made, [torch.optim.SGD(made.parameters(), lr=0.1)])
        strategy.backward(module(INPUT).sum(), module, denominator=4)
        (module if owner == "module" else optimizer).zero_grad(set_to_none=to_none)
        strategy.backward(module(INPUT).sum(), module, denominator=4)
        norm = strategy.clip_gradients_norm(module, optimizer, math.inf)
        truth(INPUT).mean().backward()
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(truth.parameters(), math.inf).item())
    assert "zero_grad" not in vars(optimizer)
    assert "zero_grad" not in vars(made)


def test_a_loss_without_a_slope_counts() -> None:
    strategy, module, optimizer = ready()
    truth = copy.deepcopy(module)
    strategy.backward(0 * module(INPUT).sum(), module, denominator=4)
    strategy.backward(module(INPUT).sum(), module, denominator=4)
    norm = strategy.clip_gradients_norm(module, optimizer, math.inf)
    (truth(INPUT).sum() / 8).backward()
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(truth.parameters(), math.inf).item())


def test_gradients_thrown_away_are_forgotten() -> None:
    strategy, module, optimizer = ready()
    strategy.backward(module(INPUT).sum(), module, denominator=4)
    strategy.clip_gradients_norm(module, optimizer, 1.0)
    optimizer.zero_grad()
    strategy.backward(module(INPUT).sum(), module, denominator=4)
    norm = strategy.clip_gradients_norm(module, optimizer, math.inf)
    optimizer.zero_grad()
    strategy.backward(module(INPUT).mean(), module)
    assert norm == pytest.approx(strategy.clip_gradients_norm(module, optimizer, math.inf).item())


@pytest.mark.parametrize("name", ["single", "ddp"])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_thrown_away_inside_no_backward_sync_are_forgotten(name: str, to_none: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    with get_strategy(name) as strategy:
        module, (optimizer,) = strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), 0.1)])
        with strategy.no_backward_sync(module):
            strategy.backward(module(INPUT).square().sum(), module, denominator=4)
            optimizer.zero_grad(set_to_none=to_none)
            strategy.backward(module(INPUT).sum(), module, denominator=4)
        strategy.backward(module(INPUT).sum(), module, denominator=4)
        norm = strategy.clip_gradients_norm(module, optimizer, math.inf)
    expected = torch.cat([INPUT.mean(0), torch.ones(1)]).norm()
    assert norm.item() == pytest.approx(expected.item())


def nested_contexts(name: str) -> tuple[list[float], str, list[float]]:
    """Return a gradient inside, what a step then raises, and the gradient after a last backward outside."""
    with get_strategy(name) as strategy:
        module = nn.Linear(3, 1, bias=False)
        model, (optimizer,) = strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters(), 0.1)])

        def backward() -> None:
            strategy.backward(model(torch.eye(3) * (1 + strategy.global_rank)).sum(), model)

        with strategy.no_backward_sync(model):
            with strategy.no_backward_sync(model):
                backward()
            backward()
        assert module.weight.grad is not None
        inside = module.weight.grad.flatten().tolist()
        with pytest.raises(SetupError) as error:
            strategy.optimizer_step(optimizer)
        backward()
        strategy.optimizer_step(optimizer)
        return inside, str(error.value), module.weight.grad.flatten().tolist()


def test_the_end_of_an_inner_no_backward_sync_does_not_end_the_outer(worlds: Any) -> None:
    for rank, (inside, message, outside) in enumerate(worlds(2).run(nested_contexts, "ddp")):
        assert inside == [2.0 * (1 + rank)] * 3
        assert message.startswith("the last backward was inside no_backward_sync")
        assert outside == [4.5] * 3


def test_a_denominator_counts_where_its_loss_reached_nothing() -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"left": nn.Linear(3, 1), "right": nn.Linear(3, 1)})
    with get_strategy("single") as strategy:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in module.values()]
        module, optimizers = strategy.setup_module_and_optimizers(module, optimizers)
        strategy.backward(module["left"](INPUT).sum(), module, denominator=4)
        strategy.backward(module["right"](INPUT).sum(), module, denominator=4)
        norms = [strategy.clip_gradients_norm(module, optimizer, math.inf) for optimizer in optimizers]
    expected = torch.cat([INPUT.mean(0), torch.ones(1)]).norm().item() / 2
    assert [norm.item() for norm in norms] == pytest.approx([expected] * 2)


def test_a_step_between_micro_batches_is_refused() -> None:
    strategy, module, optimizer = ready()
    with strategy.no_backward_sync(module):
        strategy.backward(module(INPUT).mean(), module)
    for act in (
        lambda: strategy.optimizer_step(optimizer),
        lambda: strategy.clip_gradients_norm(module, optimizer, 1.0),
        lambda: strategy.clip_gradients_value(module, optimizer, 1.0),
    ):
        with pytest.raises(SetupError, match="the last backward was inside no_backward_sync, which leaves averaging"):
            act()
    strategy.backward(module(INPUT).mean(), module)
    assert strategy.optimizer_step(optimizer)


def test_denominators_for_all_micro_batches_or_none() -> None:
    strategy, module, _ = ready()
    strategy.backward(module(INPUT).sum(), module, denominator=4)
    with pytest.raises(InvalidOption, match="some micro-batches of this step have a denominator and some have none"):
        strategy.backward(module(INPUT).mean(), module)


@pytest.mark.parametrize("denominator", [0, torch.tensor(0), -1.0])
def test_denominators_must_count_something(denominator: Any) -> None:
    strategy, module, optimizer = ready()
    strategy.backward(module(INPUT).sum(), module, denominator=denominator)
    with pytest.raises(InvalidOption, match="the denominators of this step add up to"):
        strategy.optimizer_step(optimizer)


def test_clipping_by_value() -> None:
    strategy, module, optimizer = ready()
    strategy.backward(module(INPUT).sum(), module)
    strategy.clip_gradients_value(module, optimizer, 0.5)
    assert module.weight.grad.abs().max() == 0.5


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_a_closure_evaluates_the_loss_again(name: str) -> None:
    with get_strategy(name) as strategy:
        torch.manual_seed(0)
        module = nn.Linear(3, 1)
        truth = nn.Linear(3, 1)
        truth.load_state_dict(module.state_dict())
        module, (optimizer,) = strategy.setup_module_and_optimizers(
            module, [torch.optim.LBFGS(module.parameters(), max_iter=4)]
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(INPUT).square().sum()
            strategy.backward(loss, module, denominator=4)
            return loss / 4

        assert strategy.optimizer_step(optimizer, closure)
        plain = torch.optim.LBFGS(truth.parameters(), max_iter=4)

        def plain_closure() -> torch.Tensor:
            plain.zero_grad()
            loss = truth(INPUT).square().mean()
            loss.backward()
            return loss

        plain.step(plain_closure)
        torch.testing.assert_close(strategy.unwrap(module).weight, truth.weight, rtol=1e-5, atol=1e-6)


def test_a_closure_and_a_scaler_do_not_go_together() -> None:
    strategy, _, optimizer = ready(precision="16-mixed")
    with pytest.raises(InvalidOption, match="a closure cannot be combined with precision '16-mixed'"):
        strategy.optimizer_step(optimizer, lambda: None)


def test_a_forward_that_raises_leaves_autocast() -> None:
    strategy, module, _ = ready(precision="bf16-mixed")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.ones(2, 99))
    assert not torch.is_autocast_enabled("cpu")
    assert module(INPUT).dtype == torch.bfloat16
    strategy.teardown()
    assert module(INPUT).dtype == torch.float32


def test_schedulers_count_optimizer_steps() -> None:
    strategy, module, optimizer = ready()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        strategy.backward(module(INPUT).mean(), module)
        strategy.optimizer_step(optimizer)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_buffers_are_options_of_this_torch(recwarn: Any) -> None:
    for keep in (True, False):
        with get_strategy("ddp", broadcast_buffers=keep) as strategy:
            strategy.setup_module(nn.Linear(1, 1))
    assert not [warning for warning in recwarn if "buffers" in str(warning.message)]
