"""What users do by hand and would be lost is refused on every rank, in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from xla_stories import FSDP, SPMD, Block, Net, Story, sgd

from shard_core import SetupError, get_strategy


def hook_before_setup(strategy: Any) -> None:
    def start(net: Net) -> Any:
        net.head.weight.register_post_accumulate_grad_hook(print)
        return net.parameters()

    Story(strategy, sgd, start)


def parameters_of_before(strategy: Any) -> None:
    torch.manual_seed(0)
    kept: list[nn.Parameter] = []

    def start(net: Net) -> Any:
        kept.extend(net.block.parameters())
        return net.head.parameters()

    story = Story(strategy, sgd, start)
    story.optimizer.add_param_group({"params": kept})
    story.train()


def setup_again(strategy: Any) -> None:
    strategy.setup_module(Story(strategy, sgd).net)


def hook_after_setup(strategy: Any) -> None:
    story = Story(strategy, sgd)
    next(story.net.parameters()).register_hook(lambda gradient: 2 * gradient)
    story.train()


def penalty_outside(strategy: Any) -> None:
    story = Story(strategy, sgd)
    story.backward(story.loss() + sum(parameter.norm() for parameter in story.net.parameters()))


def value_of_an_attribute(strategy: Any) -> None:
    story = Story(strategy, sgd)
    story.train()
    with torch.no_grad():
        story.net.head.bias.mul_(0.5)
    story.train()


def zeroing_between_micro_batches(strategy: Any) -> None:
    story = Story(strategy, sgd)
    with strategy.no_backward_sync(story.model):
        story.backward(story.loss())
    story.optimizer.zero_grad(set_to_none=False)
    story.train()


def replacing_between_micro_batches(strategy: Any) -> None:
    story = Story(strategy, sgd)
    with strategy.no_backward_sync(story.model):
        story.backward(story.loss())
    for parameter in story.net.parameters():
        parameter.grad = parameter.grad * 0.5 if parameter.grad is not None else None
    story.train()


def past_another_module_in_the_last_micro_batch(strategy: Any) -> None:
    story, other = Story(strategy, sgd), Story(strategy, sgd)
    with strategy.no_backward_sync(story.model):
        story.backward(story.loss())
    other.backward(other.loss())
    strategy.optimizer_step(other.optimizer)
    strategy.optimizer_step(story.optimizer)


def backward_past_a_step(strategy: Any) -> None:
    story = Story(strategy, sgd)
    loss = story.loss()
    story.train()
    story.backward(loss)


class Outer(nn.Module):
    """Writes to what a unit inside it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.block.linear.weight.clamp_(-0.25, 0.25)
        output: torch.Tensor = self.block(inputs)
        return output


def writing_into_a_unit(strategy: Any) -> None:
    strategy.setup_module(Outer())(strategy.batch_to_device(torch.ones(2, 6)))


def clipping_by_torch(strategy: Any) -> None:
    story = Story(strategy, sgd)
    story.backward(story.loss())
    nn.utils.clip_grad_norm_(story.model.parameters(), 1e-3)
    strategy.optimizer_step(story.optimizer)


def clipping_by_torch_after_a_step(strategy: Any) -> None:
    story = Story(strategy, sgd)
    story.backward(story.loss())
    strategy.optimizer_step(story.optimizer)
    nn.utils.clip_grad_norm_(story.model.parameters(), 1e-3)
    strategy.clip_gradients_norm(story.model, story.optimizer, 1.0)


BOTH: dict[Any, str] = {
    setup_again: "this Net was set up already",
    hook_before_setup: "parameter 'head.weight' has a hook on its gradient that nothing would call",
    parameters_of_before: "of no module that was set up",
    backward_past_a_step: "modified by an inplace operation",  # autograd's own sentence
}
SHARDS: dict[Any, str] = {
    hook_after_setup: "parameter 'first.weight' got a hook on its gradient",
    penalty_outside: "the loss was computed from this rank's shard of parameter",
    value_of_an_attribute: "parameter 'head.bias' was changed in place through its module's attribute",
    zeroing_between_micro_batches: "all of these micro-batches are thrown away: begin them anew",
    replacing_between_micro_batches: "all of these micro-batches are thrown away: begin them anew",
    writing_into_a_unit: "a forward wrote to a weight of a unit inside it",
    clipping_by_torch: "scaled their shards of the gradients by different factors",
    clipping_by_torch_after_a_step: "scaled their shards of the gradients by different factors",
    past_another_module_in_the_last_micro_batch: "the last backward outside did not come through its module",
}


def messages(strategy_name: str, acts: list[Any]) -> list[str]:
    answers = []
    with get_strategy(strategy_name, accelerator="xla", auto_wrap_policy={Block}) as strategy:
        for act in acts:
            try:
                act(strategy)
                answers.append("no error")
            except RuntimeError as error:
                answers.append(str(error))
    return answers


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [
        pytest.param(FSDP, {**BOTH, **SHARDS}, id="xla_fsdp"),
        pytest.param(SPMD, BOTH, id="xla_spmd", marks=pytest.mark.long),
    ],
)
def test_what_would_be_lost_is_refused_on_every_rank(worlds: Any, strategy: Any, refused: dict[Any, str]) -> None:
    name, ranks, environment = strategy
    for answers in worlds(ranks, environment).run(messages, name, list(refused), timeout=240):
        for (act, sentence), message in zip(refused.items(), answers, strict=True):
            assert sentence in message, act.__name__


def used_after_teardown() -> tuple[list[str], bool]:
    """Call a module and step its optimizer after teardown; return what is said, and whether shards stayed."""
    with get_strategy(FSDP[0], accelerator="xla", auto_wrap_policy={Block}) as strategy:
        story = Story(strategy, sgd)
        story.backward(story.loss())
    before = [each.detach().cpu() for each in story.net.parameters()]
    said = []
    for use in (story.loss, story.optimizer.step):
        with pytest.raises(SetupError) as raised:
            use()
        said.append(str(raised.value))
    return said, all(map(torch.equal, before, (each.detach().cpu() for each in story.net.parameters())))


def test_what_stays_sharded_is_neither_called_nor_stepped(worlds: Any) -> None:
    for (called, stepped), unchanged in worlds(FSDP[1], FSDP[2]).run(used_after_teardown, timeout=240):
        assert called.startswith("a module was called after strategy 'xla_fsdp'")
        assert stepped.startswith("this SGD holds parameters of a module whose strategy 'xla_fsdp' was torn down")
        assert unchanged
