"""The scaler's schedule is torch's, and it changes only between steps."""

import pytest
import torch

from shard_core import NonFiniteGradient
from shard_core.precision.scaler import GradientScaler


def test_the_schedule_is_that_of_torch() -> None:
    ours = GradientScaler(factor=64.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for bad in (False, False, True, False, False, False, False, True, True, False, False, False, False):
        theirs.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]
        if bad:
            assert parameter.grad is not None
            parameter.grad.fill_(torch.inf)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.record(finite=not bad)
        assert ours.begin_backward() == theirs.get_scale()


def test_it_grows_no_further_than_float32_can_hold_as_torchs() -> None:
    ours = GradientScaler(factor=2.0**126, growth_interval=1)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for _ in range(3):
        theirs.scale(parameter.sum() * 1e-30).backward()  # type: ignore[no-untyped-call]
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.record(finite=True)
        assert ours.begin_backward() == theirs.get_scale() < torch.inf


def test_two_optimizers_stepped_in_a_row_share_one_factor() -> None:
    scaler = GradientScaler(factor=8.0)
    scaler.record(finite=False)
    assert scaler.factor == 8.0
    scaler.record(finite=True)
    assert scaler.begin_backward() == 4.0, "one overflow halves it once"
    assert scaler.begin_backward() == 4.0


def test_state_survives_a_restart() -> None:
    scaler = GradientScaler(factor=8.0, growth_interval=3)
    for _ in range(2):
        scaler.record(finite=True)
        scaler.begin_backward()
    again = GradientScaler(growth_interval=3)
    again.load_state_dict(scaler.state_dict())
    again.record(finite=True)
    assert again.begin_backward() == 16.0


def test_what_is_saved_between_the_steps_of_two_optimizers_goes_on_as_if_nothing_had_been() -> None:
    scaler, again = GradientScaler(factor=8.0), GradientScaler()
    scaler.record(finite=False)
    state = scaler.state_dict()
    assert state["factor"] == 4.0, "the next backward's"
    again.load_state_dict(state)
    for each in (scaler, again):
        each.record(finite=False)
    assert again.begin_backward() == scaler.begin_backward() == 4.0
    assert again.state_dict() == scaler.state_dict() == {"factor": 4.0, "clean_steps": 0}


def _factors(scaler: GradientScaler, outcomes: str) -> list[float]:
    """Return the factor after each step: ``o`` stands for an overflow, ``.`` for a clean one."""
    factors = []
    for outcome in outcomes:
        scaler.record(finite=outcome == ".")
        factors.append(scaler.begin_backward())
    return factors


def test_hysteresis_lets_overflows_pass_until_it_is_used_up_and_growth_fills_it_up_again() -> None:
    scaler = GradientScaler(factor=16.0, growth_interval=2, hysteresis=2)
    assert _factors(scaler, "ooo..ooo") == [16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 4.0, 2.0]


def test_overflows_that_have_passed_survive_a_restart() -> None:
    scaler = GradientScaler(factor=16.0, hysteresis=2)
    assert _factors(scaler, "o") == [16.0]
    again = GradientScaler(hysteresis=2)
    again.load_state_dict(scaler.state_dict())
    assert _factors(again, "o") == [8.0]


def test_the_least_factor_is_kept_and_an_overflow_there_is_told() -> None:
    scaler = GradientScaler(factor=8.0, min_factor=3.0)
    assert _factors(scaler, "oo") == [4.0, 3.0]
    with pytest.raises(NonFiniteGradient, match="multiplied by 3, the least factor"):
        scaler.record(finite=False)
    scaler.record(finite=True)  # what was refused has not been counted
    assert scaler.begin_backward() == 3.0


def test_a_factor_that_is_fixed_neither_moves_nor_ends_a_run() -> None:
    scaler = GradientScaler(factor=4.0, growth_factor=1.0, backoff_factor=1.0, growth_interval=1, min_factor=4.0)
    assert _factors(scaler, "o.oo") == [4.0] * 4
