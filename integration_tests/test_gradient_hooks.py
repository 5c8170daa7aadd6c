"""Hooks on the gradients of parameters see and change what they would in plain PyTorch, before ranks average."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shard_core import SetupError, get_strategy
from shard_core.testing.models import share, share_of
from shard_core.testing.oracle import assert_same_weights


def split(model: Any, mesh: Any) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


SHARDING: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {"auto_wrap_policy": {nn.Linear}}),
    "fsdp-compiled": ("fsdp", {}),
    "fsdp_cpu_offload": ("fsdp_cpu_offload", {}),
    "fsdp-kept": ("fsdp", {"reshard_after_forward": False, "ignored_states": ["up.bias"]}),
    "hsdp": ("hsdp", {"device_mesh": (2, 1)}),
    "tp-data": ("tp", {"tensor_parallel_size": 1}),
    "tp-tensor": ("tp", {"tensor_parallel_size": 2, "parallelize_fn": split}),
    "deepspeed_stage_0": ("deepspeed", {"stage": 0}),
    "deepspeed_stage_1": ("deepspeed_stage_1", {}),
    "deepspeed_stage_2": ("deepspeed_stage_2", {}),
    "deepspeed_stage_3": ("deepspeed_stage_3", {"param_persistence_threshold": 0}),
}
EVERY = pytest.mark.parametrize("case", SHARDING)
PLAINLY = ["fsdp", "fsdp_cpu_offload", "hsdp", "tp-data", "tp-tensor"]
"""Those that have gradients averaged by ``loss.backward()``, too."""
STEPS, MICRO = 4, 2

Seen = dict[str, list[torch.Tensor]]


class Net(nn.Module):
    """Tied weights, layers that run twice, and a scalar, or a vector of one element."""

    def __init__(self, scalar: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.tensor(0.7 if scalar else [0.7]))
        self.logits = nn.Linear(4, 8, bias=False)
        self.logits.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens).mean(1)
        for _ in range(2):
            hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return self.logits(self.scale * self.norm(hidden)).square().mean()


def _record(seen: Seen, name: str, gradient: torch.Tensor) -> None:
    seen[name].append(gradient.detach().clone())


def _clamp(bound: float, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-bound, bound)


def _in_place(gradient: torch.Tensor) -> None:
    gradient.mul_(0.5)


def _shifted(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + 0.01


class Hooks:
    """Hooks of a run, some of which come after setup, and some of which go."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.going: list[Any] = []

    def before_setup(self, net: Net) -> None:
        named = {**dict(net.named_parameters()), "logits.weight": net.logits.weight}
        for name in ("words.weight", "up.weight", "down.weight", "down.bias", "scale"):
            named[name].register_hook(functools.partial(_record, self.seen, name))
        net.words.weight.register_hook(functools.partial(_clamp, 0.02))
        net.up.weight.register_hook(functools.partial(_clamp, 0.02))
        net.up.weight.register_hook(_shifted)
        net.down.weight.register_hook(_in_place)
        net.down.bias.register_hook(_shifted)
        net.scale.register_hook(_shifted)
        self.going.append(net.down.bias.register_hook(torch.neg))

    def after_step(self, step: int, net: Net) -> None:
        named = dict(net.named_parameters())
        if step == 0:
            self.going.pop().remove()
            named["norm.weight"].register_hook(functools.partial(_record, self.seen, "norm.weight"))
            named["norm.weight"].register_hook(_shifted)
            named["up.bias"].register_hook(functools.partial(_clamp, 0.01))
            self.going.append(named["up.weight"].register_hook(torch.neg))
        if step == 2:
            self.going.pop().remove()


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.05, momentum=0.5)


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.05, eps=1e-3)


def batches() -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(8, (4, 3), generator=generator),) for _ in range(STEPS * MICRO)]


def train(case: str, make: Callable[[Any], optim.Optimizer], plainly: bool) -> Any:
    """Return what hooks saw on this rank, and by step losses, norms, gradients, weights and state."""
    name, options = SHARDING[case]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        torch.manual_seed(0)
        with strategy.module_init_context():
            net = Net(scalar=not plainly)
        hooks = Hooks(defaultdict(list))
        hooks.before_setup(net)
        if case == "fsdp-compiled":
            net.compile(backend="aot_eager")
        model, (optimizer,) = strategy.setup_module_and_optimizers(net, [make(net.parameters())])
        given = iter(batches())
        steps = []
        for step in range(STEPS):
            losses = []
            for micro in range(MICRO):
                with strategy.no_backward_sync(model, enabled=not plainly and micro < MICRO - 1):
                    loss = model(*share_of(strategy, next(given)))
                    if plainly:
                        loss.backward()
                    else:
                        strategy.backward(loss, model)
                losses.append(loss.detach())
            gradients = strategy.module_gradients(model)
            norm = strategy.clip_gradients_norm(model, optimizer, 1e3)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            state = _state(strategy.optimizer_state_dict(optimizer).get("state", {}))
            losses = strategy.all_reduce(torch.stack(losses))
            steps.append((losses, norm, gradients, strategy.module_state_dict(model), state))
            hooks.after_step(step, strategy.unwrap(model))
        return strategy.distributed_sampler_kwargs, dict(hooks.seen), steps


def _state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    slots = {f"{name}.{slot}": value for name, own in state.items() for slot, value in own.items()}
    return {name: value.clone() for name, value in slots.items() if isinstance(value, torch.Tensor)}


def train_plainly(make: Callable[[Any], optim.Optimizer], ranks: int, scalar: bool) -> Any:
    """Go backward from each rank's loss, whose gradient goes through the hooks, and average what they leave."""
    torch.manual_seed(0)
    net = Net(scalar)
    seen: list[Seen] = [defaultdict(list) for _ in range(ranks)]
    hooks = Hooks(defaultdict(list))
    hooks.before_setup(net)
    optimizer = make(net.parameters())
    names = {each: name for name, each in net.named_parameters()}
    given = iter(batches())
    steps = []
    for step in range(STEPS):
        losses = []
        for batch in (next(given) for _ in range(MICRO)):
            own = [net(*share(batch, rank, ranks)) for rank in range(ranks)]
            for rank, loss in enumerate(own):
                loss.backward()
                for name, gradients in hooks.seen.items():
                    seen[rank][name] += gradients
                hooks.seen.clear()
            losses.append(torch.stack(own).detach().mean())
        for parameter in net.parameters():
            parameter.grad /= ranks
        named = net.named_parameters(remove_duplicate=False)
        gradients = {name: each.grad.clone() for name, each in named}
        norm = torch.stack([each.grad.norm() for each in net.parameters()]).norm()
        optimizer.step()
        optimizer.zero_grad()
        state = _state({names[each]: slots for each, slots in optimizer.state.items()})
        weights = {name: each.clone() for name, each in net.state_dict().items()}
        steps.append((torch.stack(losses), norm, gradients, weights, state))
        hooks.after_step(step, net)
    return seen, steps


@pytest.mark.parametrize("make", [sgd, pytest.param(adamw, marks=pytest.mark.long)])
@pytest.mark.parametrize(("case", "plainly"), [*((c, False) for c in SHARDING), *((c, True) for c in PLAINLY)])
def test_hooks_see_and_change_what_they_would_in_plain_pytorch(
    worlds: Any, case: str, plainly: bool, make: Callable[[Any], optim.Optimizer]
) -> None:
    ranks = worlds(2).run(train, case, make, plainly)
    seen, truth = train_plainly(make, ranks[0][0]["num_replicas"], scalar=not plainly)
    for data, mine, steps in ranks:
        theirs = seen[data["rank"]]
        assert mine.keys() == theirs.keys()
        for name, gradients in theirs.items():
            assert len(mine[name]) == len(gradients)
            for one, other in zip(mine[name], gradients, strict=True):
                assert_same_weights({name: one}, {name: other}, 1e-5)
        for one, other in zip(steps, truth, strict=True):
            for place in (0, 1):
                torch.testing.assert_close(one[place], other[place], rtol=1e-5, atol=1e-6)
            if data["rank"] == 0 and one[2]:
                for place in (2, 3, 4):
                    assert_same_weights(one[place], other[place], 1e-5)


class Layer(nn.Module):
    """A layer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * self.linear(x)).square().mean()


def rows(rank: int) -> torch.Tensor:
    return torch.ones(2, 4) * (1 + rank)


def penalized(strategy: Any, layer: Any, seen: Seen) -> None:
    """Compute a part of the loss from a shard, first with a hook on it, then with none any more."""
    weight = dict(layer.named_parameters())["linear.weight"]
    handles = [layer.hook, weight.register_hook(functools.partial(_record, seen, "weight"))]
    for hooked in (True, False):
        loss = layer(rows(strategy.global_rank)) + weight.full_tensor().square().sum()
        if hooked:
            with pytest.raises(SetupError, match=r"shape \(4, 4\) outside the module's forward, and a hook"):
                strategy.backward(loss, layer)
            layer.zero_grad()
            for handle in handles:
                handle.remove()
        else:
            strategy.backward(loss, layer)


def plainly_beside_a_scalar(strategy: Any, layer: Any, seen: Seen) -> None:
    """Go backward past the strategy, which would average the scalar's gradient."""
    with pytest.raises(SetupError, match=r"leave the gradient of a parameter of shape \(\), which is not sharded"):
        layer(rows(strategy.global_rank)).backward()


def past_a_forward(strategy: Any, layer: Any, seen: Seen) -> None:
    """Register the first hooks after the first forward, and go backward past the strategy."""
    layer.scale.requires_grad_(False)
    loss = layer(rows(strategy.global_rank))
    named = dict(layer.named_parameters())
    named["linear.bias"].register_hook(functools.partial(_record, seen, "bias"))
    named["linear.weight"].register_hook(functools.partial(_record, seen, "weight"))
    loss.backward()


def unfrozen(strategy: Any, layer: Any, seen: Seen) -> None:
    """Train what was frozen at setup, with a hook from before."""
    weight = dict(layer.named_parameters())["linear.weight"]
    weight.requires_grad_(False)
    for trained in (False, True, False, True):
        weight.requires_grad_(trained)
        strategy.backward(layer(rows(strategy.global_rank)), layer)


ACTS = [penalized, past_a_forward, unfrozen, plainly_beside_a_scalar]


def act_all(name: str, options: dict[str, Any]) -> list[Any]:
    shown = []
    for act in ACTS:
        with get_strategy(name, accelerator="cpu", **options) as strategy:
            torch.manual_seed(0)
            layer: Any = Layer()
            seen: Seen = defaultdict(list)
            layer.hook = layer.linear.weight.register_hook(functools.partial(_record, seen, "before"))
            layer.linear.weight.requires_grad_(act is not unfrozen)
            layer = strategy.setup_module(layer)
            act(strategy, layer, seen)
            if act is not plainly_beside_a_scalar:
                shown.append((dict(seen), strategy.module_gradients(layer)))
    return shown


@pytest.mark.parametrize(("name", "options"), [("fsdp", {}), ("tp", {"tensor_parallel_size": 1})])
def test_hooks_of_shards_are_called_once_or_refused(worlds: Any, name: str, options: dict[str, Any]) -> None:
    ranks = worlds(2).run(act_all, name, options)
    own = []
    for rank in (0, 1):
        torch.manual_seed(0)
        layer = Layer()
        layer(rows(rank)).backward()
        own.append({key: each.grad for key, each in layer.named_parameters()})
    mean = {key: (one + own[1][key]) / 2 for key, one in own[0].items()}
    penalty = {**mean, "linear.weight": mean["linear.weight"] + 2 * layer.linear.weight.detach()}
    without = {key: each for key, each in mean.items() if key != "scale"}
    summed = {key: (2 if key == "linear.weight" else 4) * each for key, each in mean.items()}
    for shown, truth in zip(ranks[0], (penalty, without, summed), strict=True):
        assert_same_weights(shown[1], truth, 1e-6)
    for rank, (_, past, frozen) in enumerate(ranks):
        weight, bias = own[rank]["linear.weight"], own[rank]["linear.bias"]
        torch.testing.assert_close(past[0]["before"], [weight])
        torch.testing.assert_close(frozen[0]["before"], [weight, weight])
        torch.testing.assert_close(past[0]["weight"], [weight])
        torch.testing.assert_close(past[0]["bias"], [bias])
