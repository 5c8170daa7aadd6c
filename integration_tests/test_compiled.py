"""A model that torch.compile has compiled trains, and saves, as itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shard_core import get_strategy
from shard_core.testing import models
from shard_core.testing.oracle import assert_same_numbers


def train(strategy_name: str, compiled: bool, path: Path) -> Any:
    with get_strategy(strategy_name) as strategy:
        torch.manual_seed(0)
        model = models.make("gpt")
        if compiled:
            model = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        losses = []
        for batch in models.batches("gpt", 3, 12):
            loss = model(*models.share(batch, strategy.global_rank, strategy.world_size))
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(strategy.all_reduce(loss).item())
        strategy.save_checkpoint(path / f"compiled-{compiled}", {"model": model, "optimizer": optimizer})
        strategy.load_checkpoint(path / "compiled-False", {"model": model, "optimizer": optimizer})
        return losses, [name for name, _ in strategy.full_parameters(model)]


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_compiled_models_train_like_others_and_keep_their_names(
    worlds: Any, strategy: str, size: int, tmp_path: Path
) -> None:
    plain, names = worlds(size).run(train, strategy, False, tmp_path)[0]
    compiled, compiled_names = worlds(size).run(train, strategy, True, tmp_path, timeout=180)[0]
    assert_same_numbers("loss", compiled, plain, 1e-6)
    assert compiled_names == names
