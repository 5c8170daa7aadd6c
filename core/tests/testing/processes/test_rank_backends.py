"""Ranks of the kit talk over what carries tensors of their devices; torch for CPUs alone has none, so it is faked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shard_core.testing.processes import rank


@pytest.mark.parametrize(
    ("ranks", "devices", "backend"),
    [(1, 0, "gloo"), (1, 1, "cpu:gloo,cuda:nccl"), (2, 1, "gloo"), (2, 2, "cpu:gloo,cuda:nccl")],
)
def test_nccl_where_each_rank_can_have_a_device(
    ranks: int, devices: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": str(ranks)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    rank._join_group()
    assert made == [backend]
