"""The memory of a step, against what can be added up by hand."""

from __future__ import annotations

import pytest
import torch

from shard_core.tuning.memory import weigh

WIDTH = 512
WEIGHT = WIDTH * WIDTH * 4


def test_a_step_holds_weights_gradients_and_moments():
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step():
        loss = model(torch.ones(1, WIDTH)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses, peak = weigh(step, torch.device("cpu"))
    assert losses[0] > losses[1]
    # AdamW's loop needs room for one more tensor at a time.
    assert 4 * WEIGHT <= peak <= 6.1 * WEIGHT


def test_what_was_freed_is_not_counted():
    big = torch.ones(WIDTH, WIDTH)

    def step():
        for _ in range(5):
            big.sin().cos()

    assert 3 * WEIGHT <= weigh(step, torch.device("cpu"))[1] <= 3.01 * WEIGHT


def test_what_the_end_of_a_step_needs_is_held_at_its_beginning():
    moments = torch.ones(3 * WIDTH, WIDTH)

    def step():
        torch.ones(2 * WIDTH, WIDTH).sum()
        moments.mul_(0.5)

    assert weigh(step, torch.device("cpu"))[1] == pytest.approx(5 * WEIGHT, rel=0.01)


def test_a_device_that_cannot_be_asked_is_not_guessed_at():
    assert weigh(lambda: 1, torch.device("meta")) == ([1, 1], None)
