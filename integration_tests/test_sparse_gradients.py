"""Embeddings made with ``sparse=True`` train under sharded strategies as in plain PyTorch, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shard_core import SetupError, get_strategy
from shard_core.testing.models import share_of
from shard_core.testing.oracle import assert_same_weights


def split(model: nn.Module, mesh: Any) -> None:
    """Split the rows of an embedding over ranks, or its columns."""
    if isinstance(model, Words):
        parallelize_module(model.single, mesh, RowwiseParallel(input_layouts=Replicate()))
        parallelize_module(model.tags, mesh, ColwiseParallel(output_layouts=Replicate()))


SHARDING: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {"unit_bytes": 1}),
    "fsdp_cpu_offload": ("fsdp_cpu_offload", {}),
    "hsdp": ("hsdp", {"device_mesh": (2, 1)}),
    "tp-data": ("tp", {"tensor_parallel_size": 1}),
    "tp-tensor": ("tp", {"tensor_parallel_size": 2, "parallelize_fn": split}),
    "deepspeed_stage_0": ("deepspeed", {"stage": 0}),
    "deepspeed_stage_1": ("deepspeed_stage_1", {}),
    "deepspeed_stage_2": ("deepspeed_stage_2", {}),
    "deepspeed_stage_3": ("deepspeed_stage_3", {"param_persistence_threshold": 0}),
}
EVERY = pytest.mark.parametrize("case", SHARDING)
CLIP = 0.5

Batch = tuple[torch.Tensor]
Made = Callable[[Any], optim.Optimizer]


class Words(nn.Module):
    """Embeddings and bags of them, with rows that no batch has; the rows of one batch come back in later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Embedding(12, 4, sparse=True, padding_idx=2)
        self.bag = nn.EmbeddingBag(8, 4, sparse=True)
        self.tags = nn.Embedding(8, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.single(tokens).mean(1) + self.bag(tokens % 7) + self.tags(tokens[:, 0] % 5)
        return self.head(hidden).square().mean()


class Tied(nn.Module):
    """An embedding whose weight is also that of a layer with dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, sparse=True)
        self.logits = nn.Linear(4, 8, bias=False)
        self.logits.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(self.words(tokens % 8)).square().mean()


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.3, maximize=True)


def momentum(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.3, momentum=0.9, dampening=0.1)


def nesterov(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.3, momentum=0.9, nesterov=True)


def adagrad(parameters: Any) -> optim.Optimizer:
    return optim.Adagrad(parameters, lr=0.3, lr_decay=0.1)


def accumulated(parameters: Any) -> optim.Optimizer:
    return optim.Adagrad(parameters, lr=0.3, initial_accumulator_value=0.2)


OPTIMIZERS = (sgd, momentum, nesterov, adagrad, accumulated)


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.1)


class Plain:
    """Plain PyTorch behind a strategy's methods; what it clips is made dense first, as torch has no kernels else."""

    def setup_module_and_optimizers(self, model: nn.Module, optimizers: Any) -> Any:
        self.model = model
        return model, optimizers

    def no_backward_sync(self, model: nn.Module, enabled: bool) -> Any:
        return torch.enable_grad()

    def backward(self, loss: torch.Tensor, model: nn.Module) -> None:
        loss.backward()

    def clip_gradients_norm(self, model: nn.Module, optimizer: Any, bound: float) -> torch.Tensor:
        norm = torch.stack([p.grad.to_dense().norm() for p in model.parameters() if p.grad is not None]).norm()
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * min(1.0, bound / (float(norm) + 1e-6))
        return norm

    def optimizer_step(self, optimizer: optim.Optimizer) -> None:
        optimizer.step()

    def module_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        named = model.named_parameters(remove_duplicate=False)
        return {name: each.grad.to_dense().clone() for name, each in named if each.grad is not None}

    def module_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in model.state_dict().items()}

    def optimizer_state_dict(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        names = {each: name for name, each in self.model.named_parameters()}
        return {"state": {names[each]: slots for each, slots in optimizer.state.items()}}


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(3 * (n % 2), 5 + n, (4, 3), generator=generator),) for n in range(10)]


def train(strategy: Any, kind: type[nn.Module], make: Made, clips: bool = True) -> list[Any]:
    """Train with two backwards per step; some gradients are zeroed in place, some clipped."""
    torch.manual_seed(0)
    model = kind()
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [make(model.parameters())])
    seen: list[Any] = []
    given = iter(batches())
    for step in range(4):
        losses = []
        for last in (False, True):
            with strategy.no_backward_sync(model, enabled=not last):
                batch = next(given)
                loss = model(*(batch if isinstance(strategy, Plain) else share_of(strategy, batch)))
                strategy.backward(loss / 2, model)
                losses.append(loss.detach())
        gradients = strategy.module_gradients(model)
        norm = strategy.clip_gradients_norm(model, optimizer, CLIP) if step % 2 and clips else torch.zeros(())
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad(set_to_none=step != 1)
        loss = torch.stack(losses)
        if not isinstance(strategy, Plain):
            loss = strategy.all_reduce(loss)
        seen.append((loss, norm, gradients, strategy.module_state_dict(model), _state(strategy, optimizer)))
    return seen


def _state(strategy: Any, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    state = strategy.optimizer_state_dict(optimizer).get("state", {})
    return {
        f"{name}.{slot}": value.to_dense().clone()
        for name, slots in state.items()
        for slot, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


def train_all(case: str) -> list[Any]:
    name, options = SHARDING[case]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        return [train(strategy, Words, make) for make in OPTIMIZERS] + [train(strategy, Tied, adamw)]


def assert_same(mine: list[Any], truth: list[Any]) -> None:
    for one, other in zip(mine, truth, strict=True):
        for place in (0, 1):
            torch.testing.assert_close(one[place], other[place], rtol=1e-5, atol=1e-6)
        for place in (2, 3, 4):
            assert one[place].keys() == other[place].keys()
            assert_same_weights(one[place], other[place], 1e-5)


@EVERY
def test_sparse_embeddings_train_as_in_plain_pytorch(worlds: Any, case: str) -> None:
    *mine, tied = worlds(2).run(train_all, case)[0]
    for make, each in zip(OPTIMIZERS, mine, strict=True):
        assert_same(each, train(Plain(), Words, make))
    assert_same(tied, train(Plain(), Tied, adamw))


def decaying(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, weight_decay=0.1)


def without_eps(parameters: Any) -> optim.Optimizer:
    return optim.Adagrad(parameters, lr=0.1, eps=0.0)


def sparse_adam(parameters: Any) -> optim.Optimizer:
    return optim.SparseAdam(parameters, lr=0.1)


class Own(optim.SGD):
    """An optimizer of the user's own."""


def decaying_later(strategy: Any) -> None:
    model = Words()
    optimizer = sgd(model.parameters())
    model, _ = strategy.setup_module_and_optimizers(model, [optimizer])
    optimizer.param_groups[0]["weight_decay"] = 0.1
    strategy.backward(model(*batches()[0]), model)
    strategy.optimizer_step(optimizer)


def late(strategy: Any) -> None:
    model = Words()
    optimizer = adamw(model.parameters())
    strategy.setup_module(model)
    strategy.setup_optimizer(optimizer)


def frozen(strategy: Any) -> None:
    """Train the rest by an optimizer that would step no sparse gradients."""
    model = Words()
    model.single.requires_grad_(False)
    model.bag.requires_grad_(False)
    model.tags.requires_grad_(False)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [adamw(model.parameters())])
    strategy.backward(model(*batches()[0]), model)
    strategy.optimizer_step(optimizer)


def apart(strategy: Any) -> None:
    """Train embeddings by one optimizer and the rest by another, which would step no sparse gradients."""
    model = Words()
    optimizers = [sgd([model.single.weight, model.bag.weight, model.tags.weight]), adamw(model.head.parameters())]
    model, optimizers = strategy.setup_module_and_optimizers(model, optimizers)
    strategy.backward(model(*batches()[0]), model)
    for optimizer in optimizers:
        strategy.optimizer_step(optimizer)


REFUSED = (adamw, decaying, without_eps, sparse_adam, Own)


def refusals(case: str) -> list[str]:
    name, options = SHARDING[case]
    messages = []
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        makers = [lambda _, make=make: train(strategy, Words, make) for make in REFUSED]
        for act in (*makers, decaying_later, late, frozen, apart):
            try:
                act(strategy)
                messages.append("no error")
            except SetupError as error:
                messages.append(str(error))
    return messages


@EVERY
def test_optimizers_that_would_step_something_else_are_refused(worlds: Any, case: str) -> None:
    for *refused, trained, split in worlds(2).run(refusals, case):
        for message in refused:
            assert "was made with sparse=True" in message
            assert "take SGD or Adagrad without weight decay" in message
        assert (trained, split) == ("no error", "no error")


def loaded(case: str, state: dict[str, Any]) -> tuple[Any, list[bool]]:
    """Take over momentum that plain PyTorch has kept as sparse tensors, before setup and after it."""
    name, options = SHARDING[case]
    shown = []
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        for early in (True, False):
            torch.manual_seed(0)
            model = Words()
            optimizer = momentum(model.parameters())
            if early:
                optimizer.load_state_dict(state)
            model, _ = strategy.setup_module_and_optimizers(model, [optimizer])
            if not early:
                optimizer.load_state_dict(state)
            shown.append(_state(strategy, optimizer))
        inner = strategy.unwrap(model)
        during = [inner.single.sparse, inner.bag.sparse]
    return shown, [*during, inner.single.sparse, inner.bag.sparse]


@EVERY
def test_sparse_momentum_is_taken_over_and_layers_are_restored(worlds: Any, case: str) -> None:
    torch.manual_seed(0)
    model = Words()
    optimizer = momentum(model.parameters())
    model(*batches()[0]).backward()
    optimizer.step()
    assert optimizer.state[model.single.weight]["momentum_buffer"].is_sparse
    truth = {
        f"{name}.momentum_buffer": optimizer.state[each]["momentum_buffer"].to_dense()
        for name, each in model.named_parameters()
    }
    shown, sparse = worlds(2).run(loaded, case, optimizer.state_dict())[0]
    for mine in shown:
        assert_same_weights(mine, truth, 0.0)
    assert sparse == [False, False, True, True]
