"""Ranks whose learning rates differ are told of it when they save."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy


def warned(folder: str, own_rates: bool) -> list[str]:
    """Train with a scheduler of a loss, save, and return what was logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shard_core.optim.alike_groups")
    logger.addHandler(handler)
    try:
        with get_strategy("ddp") as strategy:
            model = nn.Linear(2, 1)
            model, (optimizer,) = strategy.setup_module_and_optimizers(
                model, [torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))]
            )
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            for step in range(3):
                loss = torch.tensor(-float(step) if strategy.global_rank == 0 else float(step))
                scheduler.step(loss if own_rates else strategy.reduce(loss))
            strategy.save_checkpoint(folder, {"model": model, "optimizer": optimizer})
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.parametrize("own_rates", [False, True])
def test_saving_warns_of_learning_rates_that_differ(worlds: Any, tmp_path: Any, own_rates: bool) -> None:
    first, second = worlds(2).run(warned, str(tmp_path / "saved"), own_rates)
    assert second == []
    if own_rates:
        assert len(first) == 1
        assert first[0].startswith("optimizer 'optimizer', group 0, has lr=0.1")
        assert "on rank 0 and 0.0" in first[0]
    else:
        assert first == []
