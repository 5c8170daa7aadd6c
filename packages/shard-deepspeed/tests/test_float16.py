"""In float16 one gradient scaler, core's, does what DeepSpeed's own would, and the numbers are plain PyTorch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import InvalidOption, NonFiniteGradient, get_strategy
from shard_core.backend import POLICIES, GradientScaler, MixedPrecision
from shard_core.testing import run_python, whole_weights
from shard_deepspeed.own_device import FLOAT16_ON_CPU

_STEPS = 12
_FIRST = 2.0**22
"""A factor that overflows in the first steps."""


def regression() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return module, [(torch.randn(6, 8), torch.randn(6, 4)) for _ in range(_STEPS)]


def plain() -> tuple[list[float], list[bool], list[torch.Tensor]]:
    """Train float16 parameters by float32 masters, with torch's gradient scaler."""
    masters, batches = regression()
    module = copy.deepcopy(masters).half()
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=_FIRST)
    losses, stepped = [], []
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(module(inputs.half()).float(), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        for master, parameter in zip(masters.parameters(), module.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        factor = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        stepped.append(scaler.get_scale() >= factor)
        for master, parameter in zip(masters.parameters(), module.parameters(), strict=True):
            parameter.data.copy_(master.data)
        losses.append(loss.item())
    return losses, stepped, [master.detach() for master in masters.parameters()]


def trained(stage: int, precision: str, options: dict[str, Any]) -> tuple[list[float], list[bool], dict[str, Any], Any]:
    with get_strategy("deepspeed", stage=stage, precision=precision, **options) as strategy:
        module, batches = regression()
        model, (optimizer,) = strategy.setup_module_and_optimizers(
            module, [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)]
        )
        losses, stepped = [], []
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
            strategy.backward(loss, model)
            stepped.append(strategy.optimizer_step(optimizer))
            optimizer.zero_grad()
            losses.append(loss.item())
        assert strategy.precision.scaler is not None
        return losses, stepped, whole_weights(strategy, model), strategy.precision.scaler.state_dict()["factor"]


@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (3, {}), (3, {"param_persistence_threshold": 0})])
def test_float16_parameters_train_as_with_torchs_scaler_and_float32_masters(
    worlds: Any, stage: int, options: dict[str, Any]
) -> None:
    losses, stepped, weights = plain()
    assert stepped[0] is False
    assert stepped[-1] is True
    for answer in worlds(2).run(trained, stage, "16-true", {"initial_scale_power": 22, **options}):
        assert answer[1] == stepped
        assert answer[0] == pytest.approx(losses, rel=2e-3)
    whole = worlds(2).run(trained, stage, "16-true", {"initial_scale_power": 22, **options})[0][2]
    for weight, truth in zip(whole.values(), weights, strict=True):
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, truth, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_losses_in_float16_are_scaled_over_float32_parameters_at_every_stage(worlds: Any, stage: int) -> None:
    with get_strategy("single", precision=MixedPrecision(POLICIES["16-mixed"], GradientScaler(factor=_FIRST))) as one:
        module, batches = regression()
        model, (optimizer,) = one.setup_module_and_optimizers(
            module, [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)]
        )
        stepped = []
        for inputs, targets in batches:
            one.backward(nn.functional.mse_loss(model(inputs).float(), targets), model)
            stepped.append(one.optimizer_step(optimizer))
            optimizer.zero_grad()
        weights = whole_weights(one, model)
    for answer in worlds(2).run(trained, stage, "16-mixed", {"initial_scale_power": 22}):
        assert answer[1] == stepped
        for name, weight in answer[2].items():
            torch.testing.assert_close(weight, weights[name], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, GradientScaler()),
        ({"loss_scale": 128}, GradientScaler(factor=128.0, growth_factor=1.0, backoff_factor=1.0)),
        (
            {"initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 4},
            GradientScaler(factor=256.0, growth_interval=3, hysteresis=2, min_factor=4),
        ),
    ],
)
def test_options_make_the_scaler(options: dict[str, Any], expected: GradientScaler) -> None:
    assert get_strategy("deepspeed_stage_2", precision="16-mixed", **options).precision.scaler == expected
    # The gradient of a loss in float16 is in float16, too, which does not hold 2 to the power of 16.
    first = expected if options else GradientScaler(factor=32768.0)
    assert get_strategy("deepspeed_stage_2", precision="16-true", **options).precision.scaler == first


def factors(outcomes: str) -> list[tuple[float, float]]:
    """Return the factor that options make after each step, an overflow or a clean one, beside DeepSpeed's own."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    with get_strategy(
        "deepspeed", precision="16-mixed", initial_scale_power=4, loss_scale_window=3, hysteresis=2, min_loss_scale=2
    ) as strategy:
        module = nn.Linear(1, 1)
        strategy.setup_module_and_optimizers(module, [torch.optim.SGD(module.parameters())])
        ours = strategy.precision.scaler
        assert ours is not None
        # It doubles one clean step after its window.
        theirs = DynamicLossScaler(
            init_scale=2**4, scale_window=2, min_scale=2, delayed_shift=2, consecutive_hysteresis=False
        )
        theirs.scale_factor = 2.0
        seen = []
        for outcome in outcomes:
            ours.record(finite=outcome == ".")
            theirs.update_scale(outcome == "o")
            seen.append((ours.begin_backward(), theirs.cur_scale))
        with pytest.raises(Exception, match="already at minimum"):
            theirs.update_scale(True)
        with pytest.raises(NonFiniteGradient, match="multiplied by 2, the least"):
            ours.record(finite=False)
        return seen


def test_the_options_make_a_factor_that_moves_as_deepspeeds_own(worlds: Any) -> None:
    (seen,) = worlds(1).run(factors, "o...oo...o...oo..oooo")
    assert [ours for ours, _ in seen] == [theirs for _, theirs in seen]
    assert {16.0, 32.0, 2.0} <= {ours for ours, _ in seen}


def fixed(factor: float) -> tuple[list[bool], Any]:
    return trained(2, "16-mixed", {"loss_scale": factor})[1::2]


def test_a_fixed_factor_stays_and_skips_what_overflows(worlds: Any) -> None:
    assert worlds(2).run(fixed, 128.0)[0] == ([True] * _STEPS, 128.0)
    assert worlds(2).run(fixed, 2.0**40)[0] == ([False] * _STEPS, 2.0**40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": -1}, "loss_scale is -1; give a positive factor, or 0"),
        ({"loss_scale": "dynamic"}, "loss_scale is 'dynamic'"),
        ({"hysteresis": 0}, "hysteresis is 0; give a number from 1 up"),
        ({"loss_scale_window": 2.5}, "loss_scale_window is 2.5"),
        ({"initial_scale_power": 128}, "initial_scale_power is 128; give a number from 0 to 127"),
        ({"min_loss_scale": 32.0, "initial_scale_power": 4}, "min_loss_scale is 32.0, and the factor begins at 2 to"),
    ],
)
def test_factors_that_make_no_sense_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("deepspeed_stage_2", precision="16-mixed", **options)


def test_the_least_factor_may_be_the_first_one() -> None:
    for precision, first in (("16-mixed", 65536.0), ("16-true", 32768.0)):
        scaler = get_strategy("deepspeed_stage_2", precision=precision, min_loss_scale=first).precision.scaler
        assert scaler is not None
        assert scaler.factor == scaler.min_factor == first
        with pytest.raises(InvalidOption, match="and the factor begins at 2 to the power of"):
            get_strategy("deepspeed_stage_2", precision=precision, min_loss_scale=first + 1)


def test_a_scaler_of_the_users_own_and_options_of_one_are_told_apart() -> None:
    precision = MixedPrecision(POLICIES["16-mixed"], GradientScaler(factor=2.0))
    strategy = get_strategy("deepspeed_stage_2", precision=precision)
    assert strategy.precision is precision
    with pytest.raises(InvalidOption, match="has a gradient scaler of its own, and hysteresis is 2; give one of the"):
        get_strategy("deepspeed_stage_2", precision=precision, hysteresis=2)


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    [
        ("32-true", {"hysteresis": 2}, "hysteresis is 2, which does nothing in a precision that scales no loss"),
        ("16-mixed", {"loss_scale": 8.0, "hysteresis": 2}, "hysteresis is 2, which does nothing beside loss_scale"),
    ],
)
def test_options_of_a_factor_that_do_nothing_are_warned_of(
    caplog: pytest.LogCaptureFixture, precision: str, options: dict[str, Any], message: str
) -> None:
    with get_strategy("deepspeed_stage_2", precision=precision, **options) as strategy:
        strategy.setup_environment()
    assert len(caplog.messages) == 1
    assert message in caplog.messages[0]


_ASKED = """
from deepspeed.accelerator import get_accelerator
from shard_core import get_strategy

get_strategy("deepspeed_stage_2", precision="16-true").setup_environment()
assert get_accelerator().is_fp16_supported()
"""


def test_float16_parameters_are_refused_where_deepspeed_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FLOAT16_ON_CPU)
    outcome = run_python(["-c", _ASKED])
    if outcome.exit_code != 0:  # else this CPU has instructions for it
        assert "DeepSpeed does not train float16 parameters on this CPU" in outcome.errors
