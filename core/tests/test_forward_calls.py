import contextlib
import threading

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.forward_calls import ForwardContexts, NoInferenceMode, RunningCall


class Nested(nn.Module):
    """Calls itself, and is stopped where it is told to."""

    def __init__(self):
        super().__init__()
        self.stops = False
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs, calls=1):
        if self.stops:
            raise KeyboardInterrupt
        return self(inputs, calls - 1) if calls else inputs * self.scale


def stopped(model, *args):
    model.stops = True
    with contextlib.suppress(KeyboardInterrupt):
        model(*args)
    model.stops = False


@pytest.fixture
def watched():
    """A module and, for each of its calls, whether those before it were over when it began."""
    model, calls, answers = Nested(), [], []

    def begin(module, args):
        latest = RunningCall()
        answers.append([call.is_over(latest) for call in calls])
        calls.append(latest)

    model.register_forward_pre_hook(begin)
    return model, calls, answers


def test_a_call_around_another_is_not_over(watched):
    model, calls, answers = watched
    model(torch.ones(2), 2)
    assert answers == [[], [False], [False, False]]
    assert all(call.is_over() for call in calls)


def test_the_next_call_sees_that_a_stopped_one_is_over(watched):
    model, _, answers = watched
    for _ in range(3):
        stopped(model, torch.ones(2))
    assert answers == [[], [True], [True, True]]


@pytest.mark.parametrize("calls", [0, 2])
def test_contexts_of_a_stopped_forward_are_left_when_the_next_begins(calls):
    model, entered = Nested(), []

    @contextlib.contextmanager
    def noted(module):
        entered.append(module)
        try:
            yield
        finally:
            entered.pop()

    ForwardContexts(noted).hook(model)
    stopped(model, torch.ones(2))
    assert len(entered) == 1
    depths = []
    model.register_forward_pre_hook(lambda module, args: depths.append(len(entered)))
    model(torch.ones(2), calls)
    assert depths == list(range(1, calls + 2))
    assert not entered


def test_autocast_ends_with_the_forward_after_a_stopped_one():
    with get_strategy("single", precision="bf16-mixed") as strategy:
        made = Nested()
        model, [optimizer] = strategy.setup_module_and_optimizers(made, [torch.optim.SGD(made.parameters(), lr=0.1)])
        stopped(strategy.unwrap(model), torch.ones(2))
        assert torch.is_autocast_enabled("cpu")  # of which nobody was told
        strategy.backward(model(torch.ones(2)).sum(), model)
        strategy.optimizer_step(optimizer)
        assert not torch.is_autocast_enabled("cpu")


def test_autocast_of_two_modules_and_of_users_ends():
    with get_strategy("single", precision="bf16-mixed") as strategy:
        inner = strategy.setup_module(Nested())
        outer = strategy.setup_module(nn.Sequential(nn.Linear(2, 2)))
        outer[0].register_forward_hook(lambda module, args, output: inner(output))
        strategy.unwrap(inner).stops = True
        with contextlib.suppress(KeyboardInterrupt):
            outer(torch.ones(2))
        strategy.unwrap(inner).stops = False
        strategy.unwrap(outer)
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu"):
            stopped(strategy.unwrap(inner), torch.ones(2))
        strategy.unwrap(outer)
        assert not torch.is_autocast_enabled("cpu")


def test_a_stop_that_the_forward_around_it_catches_leaves_no_autocast_on():
    with get_strategy("single", precision="bf16-mixed") as strategy:
        inner = strategy.setup_module(Nested())
        outer = strategy.setup_module(nn.Sequential(nn.Linear(2, 2)))
        outer[0].register_forward_hook(lambda module, args, output: stopped(inner, output))
        outer(torch.ones(2))
        assert not torch.is_autocast_enabled("cpu")


def test_a_call_that_never_began_ends_no_other():
    with get_strategy("single", precision="bf16-mixed") as strategy:
        inner = strategy.setup_module(Nested())
        outer = strategy.setup_module(nn.Sequential(nn.Linear(2, 2)))
        inner.register_forward_pre_hook(lambda module, args: 1 / 0, prepend=True)
        seen = []

        def call_in_vain(module, args, output):
            with contextlib.suppress(ZeroDivisionError):
                inner(output)
            seen.append(torch.is_autocast_enabled("cpu"))

        outer[0].register_forward_hook(call_in_vain)
        outer(torch.ones(2))
        assert seen == [True]


def test_a_call_that_was_stopped_in_a_thread_is_over():
    model, calls = Nested(), []
    model.register_forward_pre_hook(lambda module, args: calls.append(RunningCall()))
    thread = threading.Thread(target=stopped, args=(model, torch.ones(2)))
    thread.start()
    thread.join()
    assert calls[0].is_over()


def test_a_call_that_runs_in_another_thread_is_not_over():
    model, calls, asked, answered = Nested(), [], threading.Event(), threading.Event()

    def begin(module, args):
        calls.append(RunningCall())
        asked.set()
        assert answered.wait(60)

    model.register_forward_pre_hook(begin)
    thread = threading.Thread(target=model, args=(torch.ones(2),))
    thread.start()
    assert asked.wait(60)
    over = calls[0].is_over()
    answered.set()
    thread.join()
    assert not over
    assert calls[0].is_over()


def test_a_forward_stopped_in_inference_mode_leaves_no_mode_behind():
    model = Nested()
    NoInferenceMode(model)
    with torch.inference_mode():
        stopped(model, torch.ones(2))
    assert model(torch.ones(2)).requires_grad
    assert torch.ones(2, requires_grad=True).add(1).requires_grad
    assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        stopped(model, torch.ones(2))
        model(torch.ones(2))
        assert not torch.is_grad_enabled()
    assert model(torch.ones(2)).requires_grad
