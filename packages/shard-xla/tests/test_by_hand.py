"""What users do by hand to parameters, gradients and graphs comes out as in plain PyTorch, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from xla_environments import HASTY, spread_over

from shard_core import get_strategy
from shard_core.testing import models, oracle

FSDP: tuple[str, int, dict[str, str]] = ("xla_fsdp", 2, HASTY)
SPMD: tuple[str, int, dict[str, str]] = ("xla_spmd", 1, spread_over(4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.linear(inputs))


class Net(nn.Module):
    """A unit of its own between parameters of the root, and a penalty where weights are whole: in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = Block()
        self.head = nn.Linear(6, 3)
        self.skips = False

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        loss = nn.functional.mse_loss(self.head(hidden if self.skips else self.block(hidden)), targets)
        return loss + 0.1 * self.first.weight.norm()


class Plain:
    """The members of a strategy that the stories below need, in plain PyTorch."""

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any]) -> tuple[nn.Module, list[Any]]:
        return module, optimizers

    def unwrap(self, module: nn.Module) -> nn.Module:
        return module

    def backward(self, loss: torch.Tensor, module: nn.Module, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def clip_gradients_norm(self, module: nn.Module, optimizer: optim.Optimizer, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)

    def optimizer_step(self, optimizer: optim.Optimizer) -> None:
        optimizer.step()

    def module_state_dict(self, module: nn.Module) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


class Story:
    """A model under a strategy or in plain PyTorch, and what was measured of it."""

    def __init__(self, strategy: Any, make: Callable[[Any], optim.Optimizer], start: Any = Net.parameters) -> None:
        torch.manual_seed(0)
        net = Net()
        self.strategy = strategy
        self.model, (self.optimizer,) = strategy.setup_module_and_optimizers(net, [make(start(net))])
        self.net = strategy.unwrap(self.model)
        self.norms: list[float] = []
        self._batches = iter(models.batches("plain", 12, 12))

    def loss(self) -> torch.Tensor:
        batch = next(self._batches)
        inputs, targets = batch if isinstance(self.strategy, Plain) else models.share_of(self.strategy, batch)
        return self.model(inputs, targets)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.strategy.backward(loss, self.model, **kwargs)

    def step(self) -> None:
        self.norms.append(float(self.strategy.clip_gradients_norm(self.model, self.optimizer, 100.0)))
        self.strategy.optimizer_step(self.optimizer)
        self.optimizer.zero_grad()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.backward(self.loss())
            self.step()


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
    """Two backwards through one forward, and two forwards whose backwards come in either order."""
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
    """Look at a loss, with and without gradients, and change weights after it."""
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


def weights_kept_and_brought_back(story: Story) -> None:
    story.train()
    kept = copy.deepcopy(story.net.state_dict())
    story.train()
    story.net.load_state_dict(kept)
    story.train()


STORIES: dict[str, tuple[Callable[[Story], None], Any]] = {
    "freezing": (freezing, Net.parameters),
    "freezing_all_of_the_root": (freezing_all_of_the_root, Net.parameters),
    "unfreezing": (unfreezing, freeze_some),
    "another_model_in_between": (another_model_in_between, Net.parameters),
    "several_backwards": (several_backwards, Net.parameters),
    "evaluation_and_weights_by_hand": (evaluation_and_weights_by_hand, Net.parameters),
    "gradients_by_hand": (gradients_by_hand, Net.parameters),
    "weights_kept_and_brought_back": (weights_kept_and_brought_back, Net.parameters),
}


def told(strategy: Any, name: str, make: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    tell, start = STORIES[name]
    story = Story(strategy, make, start)
    tell(story)
    return story.norms, strategy.module_state_dict(story.model)


def tell_all(strategy_name: str, make: Any) -> dict[str, Any]:
    with get_strategy(strategy_name, accelerator="xla", auto_wrap_policy={Block}) as strategy:
        return {name: told(strategy, name, make) for name in STORIES}


@pytest.mark.parametrize(
    ("strategy", "make"),
    [
        pytest.param(FSDP, adamw, id="xla_fsdp-adamw"),
        pytest.param(FSDP, sgd, id="xla_fsdp-sgd", marks=pytest.mark.long),
        pytest.param(SPMD, adamw, id="xla_spmd-adamw", marks=pytest.mark.long),
    ],
)
def test_what_is_done_by_hand_comes_out_as_in_plain_pytorch(worlds: Any, strategy: Any, make: Any) -> None:
    name, ranks, environment = strategy
    first, *_ = worlds(ranks, environment).run(tell_all, name, make, timeout=240)
    wrong = []
    for story, (norms, weights) in first.items():
        true_norms, true_weights = told(Plain(), story, make)
        try:
            oracle.assert_same_numbers("norm", norms, true_norms, 1e-5)
            oracle.assert_same_weights(weights, true_weights, 1e-5)
        except AssertionError as error:
            wrong.append(f"{story}: {error}")
    assert not wrong, "\n".join(wrong)


def hook_before_setup(strategy: Any) -> None:
    def start(net: Net) -> Any:
        net.head.weight.register_hook(lambda gradient: 2 * gradient)
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


def freezing_before_the_backward(strategy: Any) -> None:
    story = Story(strategy, sgd)
    loss = story.loss()
    story.net.block.requires_grad_(False)
    story.backward(loss)


def freezing_between_micro_batches(strategy: Any) -> None:
    story = Story(strategy, sgd)
    with strategy.no_backward_sync(story.model):
        story.backward(story.loss())
    story.net.head.requires_grad_(False)
    story.train()


def throwing_away_between_micro_batches(strategy: Any, to_none: bool = True) -> None:
    story = Story(strategy, sgd)
    with strategy.no_backward_sync(story.model):
        story.backward(story.loss())
    story.optimizer.zero_grad(set_to_none=to_none)
    story.train()


def zeroing_between_micro_batches(strategy: Any) -> None:
    throwing_away_between_micro_batches(strategy, to_none=False)


def skipping_in_the_last_micro_batch(strategy: Any) -> None:
    story = Story(strategy, sgd)
    with strategy.no_backward_sync(story.model):
        story.backward(story.loss())
    story.net.skips = True
    story.train()


def backward_past_a_step(strategy: Any) -> None:
    story = Story(strategy, sgd)
    loss = story.loss()
    story.train()
    story.backward(loss)


def whole_values(strategy: Any) -> None:
    Story(strategy, sgd).net.load_state_dict(Net().state_dict())


BOTH: dict[Any, str] = {
    hook_before_setup: "parameter 'head.weight' has a hook on its gradient that nothing would call",
    parameters_of_before: "holds a parameter that no gradient reaches",
    backward_past_a_step: "modified by an inplace operation",  # autograd's own sentence
}
SHARDS: dict[Any, str] = {
    hook_after_setup: "parameter 'first.weight' got a hook on its gradient",
    penalty_outside: "the loss was computed from this rank's shard of parameter",
    value_of_an_attribute: "parameter 'head.bias' was changed in place through its module's attribute",
    freezing_before_the_backward: "was changed between a forward and its backward",
    freezing_between_micro_batches: "while its gradient waits for the end of no_backward_sync()",
    throwing_away_between_micro_batches: "was thrown away or changed while it waits for the end of no_backward_sync()",
    zeroing_between_micro_batches: "was thrown away or changed while it waits for the end of no_backward_sync()",
    skipping_in_the_last_micro_batch: "parameter 'block.linear.weight' got a gradient in a micro-batch inside",
    whole_values: "is a shard of shape (128,) on this rank",
}


def messages(strategy_name: str, acts: list[Any]) -> list[str]:
    answers = []
    with get_strategy(strategy_name, accelerator="xla", auto_wrap_policy={Block}) as strategy:
        for act in acts:
            try:
                act(strategy)
                answers.append("nothing was said")
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
    for said in worlds(ranks, environment).run(messages, name, list(refused), timeout=240):
        for (act, sentence), message in zip(refused.items(), said, strict=True):
            assert sentence in message, act.__name__
