"""What users do by hand to parameters, gradients and graphs comes out as in plain PyTorch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from xla_stories import FSDP, SPMD, Block, Net, Plain, Story, adamw, sgd

from shard_core import get_strategy
from shard_core.testing import oracle


def freezing(story: Story) -> None:
    """Freeze what ``parameters()`` gives and what attributes give, for two steps."""
    story.train(2)
    for parameter in story.net.block.parameters():
        parameter.requires_grad_(False)
    story.net.first.weight.requires_grad = False
    story.train(2)
    story.net.requires_grad_(True)
    story.train()


def freezing_all_of_the_root(story: Story) -> None:
    story.train()
    for part in (story.net.first, story.net.head):
        part.requires_grad_(False)
    story.train(2)


def unfreezing(story: Story) -> None:
    story.train(2)
    story.net.block.requires_grad_(True)
    story.optimizer.add_param_group({"params": list(story.net.block.parameters()), "lr": 5e-2})
    story.net.first.requires_grad_(True)
    story.train(2)


def freeze_some(net: Net) -> list[nn.Parameter]:
    """Freeze one linear, which the optimizer holds, and the block, which it does not."""
    net.block.requires_grad_(False)
    net.first.requires_grad_(False)
    return [*net.first.parameters(), *net.head.parameters()]


def several_backwards(story: Story) -> None:
    """Run two backwards through one forward, and two forwards whose backwards come in either order."""
    loss = story.loss()
    story.backward(loss, retain_graph=True)
    story.backward(0.5 * loss)
    story.step()
    first, second = story.loss(), story.loss()
    story.backward(second)
    story.backward(first)
    story.step()
    story.train()


def another_model_in_between(story: Story) -> None:
    """Step another model between a forward and its backward."""
    other = Story(story.strategy, sgd)
    for _ in range(2):
        loss = story.loss()
        other.train()
        story.backward(loss)
        story.step()
    story.norms += other.norms


def evaluation_and_weights_by_hand(story: Story) -> None:
    """Compute a loss, with and without gradients, and change weights after it."""
    for look in (torch.no_grad, torch.enable_grad):
        story.train()
        with look():
            story.loss()
        with torch.no_grad():
            for parameter in story.net.parameters():
                parameter.mul_(0.5)
    story.train()
    loss = story.loss()
    with torch.no_grad():
        story.loss()
    story.backward(loss)
    with torch.no_grad():
        story.loss()
    story.step()


def gradients_by_hand(story: Story) -> None:
    for _ in range(2):
        story.backward(story.loss())
        for parameter in story.net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        story.net.block.zero_grad()
        story.step()
        story.model.zero_grad()


def weights_loaded(story: Story) -> None:
    """Load what the module itself gave, and whole weights from elsewhere."""
    story.train()
    kept = copy.deepcopy(story.net.state_dict())
    story.train()
    story.net.load_state_dict(kept)
    story.train()
    torch.manual_seed(1)
    story.net.load_state_dict(Net().state_dict())
    story.train()


def past_the_wrapper(story: Story) -> None:
    """Call the user's own module; its hooks run once a forward."""
    calls: list[int] = []
    story.net.register_forward_hook(lambda *_: calls.append(1))
    story.model = story.net
    story.train(2)
    assert len(calls) == 2


def weights_looked_at(story: Story) -> None:
    """Look at a weight's shape between steps, and copy the weight at the beginning of a forward."""
    story.train()
    assert story.net.first.weight.shape
    copied = story.net.first.register_forward_pre_hook(lambda layer, _: story.norms.append(len(layer.weight.detach())))
    with torch.no_grad():
        story.loss()
    copied.remove()
    story.train()


def left_out_of_the_last_micro_batch(story: Story) -> None:
    """Use a unit, and a parameter of the root's, in micro-batches before the last, and in all of them again."""
    for skips, freezes in ((True, False), (False, False), (True, True)):
        with story.strategy.no_backward_sync(story.model):
            story.backward(story.loss())
            story.net.skips = skips
            story.backward(story.loss())
        story.backward(story.loss())
        story.net.skips = False
        story.step()
        story.net.first.bias.requires_grad_(not freezes)
    story.train()


def freezing_between_micro_batches(story: Story) -> None:
    """Freeze and unfreeze a unit and a parameter of the root's whose gradients wait, before the last micro-batch."""
    for trained in (False, True, False):
        with story.strategy.no_backward_sync(story.model):
            story.backward(story.loss())
            story.net.block.requires_grad_(trained)
            story.backward(story.loss())
        story.net.first.weight.requires_grad_(trained)
        story.backward(story.loss())
        story.step()
    story.net.requires_grad_(True)
    story.train()


def freezing_past_a_forward(story: Story) -> None:
    """Freeze a unit, all of the root, and one of its parameters between a forward and its backward, and unfreeze."""
    first, block, head = story.net.first, story.net.block, story.net.head

    def frozen(loss: torch.Tensor, parts: list[Any]) -> None:
        for part in parts:
            part.requires_grad_(False)
        story.backward(loss, retain_graph=True)
        story.backward(loss)
        story.net.requires_grad_(True)

    for parts in ([block], [first, head], [first.weight], [first, block]):
        with story.strategy.no_backward_sync(story.model):
            story.backward(story.loss())
            frozen(story.loss(), parts)
        frozen(story.loss(), parts)
        story.step()
        block.requires_grad_(False)
        loss = story.loss()
        block.requires_grad_(True)
        story.backward(loss)
        story.step()
    story.train()


def hooks_on_gradients(story: Story) -> None:
    """Change gradients by hooks from before setup, in all micro-batches, and until they are removed."""
    story.train()
    with story.strategy.no_backward_sync(story.model):
        story.backward(story.loss())
    story.train()
    story.net.hooked[0].remove()
    story.net.first.bias.requires_grad_(True)
    story.train(2)


def hook_some(net: Net) -> Any:
    """Register hooks on parameters, one of them frozen for now."""
    parameters = [net.first.weight, net.first.weight, net.block.linear.weight, net.first.bias]
    net.hooked = [each.register_hook(functools.partial(torch.mul, 0.5 + n)) for n, each in enumerate(parameters)]
    net.head.weight.register_hook(lambda _: None)
    net.first.bias.requires_grad_(False)
    return net.parameters()


STORIES: dict[str, tuple[Callable[[Story], None], Any]] = {
    "freezing": (freezing, Net.parameters),
    "freezing_all_of_the_root": (freezing_all_of_the_root, Net.parameters),
    "unfreezing": (unfreezing, freeze_some),
    "another_model_in_between": (another_model_in_between, Net.parameters),
    "several_backwards": (several_backwards, Net.parameters),
    "evaluation_and_weights_by_hand": (evaluation_and_weights_by_hand, Net.parameters),
    "gradients_by_hand": (gradients_by_hand, Net.parameters),
    "weights_loaded": (weights_loaded, Net.parameters),
    "past_the_wrapper": (past_the_wrapper, Net.parameters),
    "weights_looked_at": (weights_looked_at, Net.parameters),
    "left_out_of_the_last_micro_batch": (left_out_of_the_last_micro_batch, Net.parameters),
    "freezing_between_micro_batches": (freezing_between_micro_batches, Net.parameters),
    "freezing_past_a_forward": (freezing_past_a_forward, Net.parameters),
    "hooks_on_gradients": (hooks_on_gradients, hook_some),
}


def run_story(strategy: Any, name: str, make: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    story_steps, start = STORIES[name]
    story = Story(strategy, make, start)
    story_steps(story)
    return story.norms, strategy.module_state_dict(story.model)


def tell_all(strategy_name: str, make: Any) -> dict[str, Any]:
    with get_strategy(strategy_name, accelerator="xla", auto_wrap_policy={Block}) as strategy:
        return {name: run_story(strategy, name, make) for name in STORIES}


@pytest.mark.parametrize(
    ("strategy", "make"),
    [
        pytest.param(FSDP, adamw, id="xla_fsdp-adamw", marks=pytest.mark.long),
        pytest.param(FSDP, sgd, id="xla_fsdp-sgd", marks=pytest.mark.long),
        pytest.param(SPMD, adamw, id="xla_spmd-adamw", marks=pytest.mark.long),
    ],
)
def test_what_is_done_by_hand_comes_out_as_in_plain_pytorch(worlds: Any, strategy: Any, make: Any) -> None:
    name, ranks, environment = strategy
    first, *_ = worlds(ranks, environment).run(tell_all, name, make, timeout=240)
    wrong = []
    for story, (norms, weights) in first.items():
        true_norms, true_weights = run_story(Plain(), story, make)
        try:
            oracle.assert_same_numbers("norm", norms, true_norms, 1e-5)
            oracle.assert_same_weights(weights, true_weights, 1e-5)
        except AssertionError as error:
            wrong.append(f"{story}: {error}")
    assert not wrong, "\n".join(wrong)
