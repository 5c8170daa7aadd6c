"""Hugging Face models train unmodified under every strategy, from the weights of a plain build."""

from typing import Any

import hugging_face
import pytest
import torch

from shard_core import get_strategy
from shard_core.testing.oracle import assert_same_numbers, assert_same_weights

STEPS, BATCH = 4, 6


def plain_build(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(11)
    model = hugging_face.make(name)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return model, {key: tensor.detach().clone() for key, tensor in tensors}


def plain_run(name: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model, _ = plain_build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for batch in hugging_face.batches(name, STEPS, BATCH):
        loss = model(**batch).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, dict(model.named_parameters())


def run(strategy_name: str, name: str) -> Any:
    with get_strategy(strategy_name) as strategy:
        strategy.seed_everything(11)
        with strategy.module_init_context():
            model = hugging_face.make(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        start = {key: tensor.clone() for key, tensor in strategy.full_parameters(model)}
        start |= {key: buffer.clone() for key, buffer in strategy.unwrap(model).named_buffers()}
        losses, norms = [], []
        for batch in hugging_face.batches(name, STEPS, BATCH):
            rank, size = strategy.global_rank, strategy.world_size
            loss = model(**{key: value.chunk(size)[rank] for key, value in batch.items()}).loss
            strategy.backward(loss, model)
            norms.append(strategy.clip_gradients_norm(model, optimizer, 1.0).item())
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(strategy.all_reduce(loss).item())
        return losses, norms, dict(strategy.full_parameters(model)), start


@pytest.mark.parametrize("name", hugging_face.NAMES)
@pytest.mark.parametrize(
    ("strategy", "size"),
    [("single", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2), pytest.param("fsdp", 3, marks=pytest.mark.long)],
)
def test_trains_like_plain_pytorch_from_the_weights_of_a_plain_build(
    worlds: Any, strategy: str, size: int, name: str
) -> None:
    losses, norms, weights = plain_run(name)
    _, start = plain_build(name)
    for got in worlds(size).run(run, strategy, name, timeout=120):
        assert start.keys() <= got[3].keys()
        for key, tensor in start.items():
            assert torch.equal(got[3][key], tensor), f"{key} does not start from the plain build's bits"
        assert_same_numbers("loss", got[0], losses, 1e-6)
        assert_same_numbers("gradient norm", got[1], norms, 2e-6)
        assert_same_weights({key: got[2][key] for key in weights}, weights, 1e-5)
