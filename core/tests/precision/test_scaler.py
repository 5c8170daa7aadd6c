"""The scaler's schedule is torch's, and it changes only between steps."""

import torch

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
