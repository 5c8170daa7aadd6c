"""Saves into an S3 bucket that are killed at one request after another; run as a script, it prints what was left.

Usage: killed_uploads.py STORAGE_OPTIONS STRIDE
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from typing import Any

import torch
from aiobotocore.session import AioSession
from fixtures.single_rank import load
from fixtures.thread_ranks import all_ranks
from torch import nn

from shard_core.checkpoint.format.folder import latest
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState


def _module(value: float) -> nn.Module:
    module = nn.Linear(64, 64, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def _save(url: str, value: float, options: dict[str, Any]) -> None:
    def on_rank(coordinator: Any) -> None:
        state = TensorState({"model": _module(value)}, {}, rank=coordinator.rank, world_size=2)
        ShardedCheckpointIO().save(
            url, state, {"value": value}, coordinator=coordinator, information={}, storage_options=options
        )

    all_ranks(2, on_rank)


def _value_in(url: str, options: dict[str, Any]) -> float:
    module = _module(-1)
    value: float = load(url, module, storage_options=options).values["value"]
    assert all(bool((parameter == value).all()) for parameter in module.parameters())
    assert verify(url, storage_options=options).is_fine
    return value


def _killed_save(url: str, request: int, options: dict[str, Any]) -> bool:
    """Replace a checkpoint in a child that dies when it is about to send a request; return whether it came to that."""
    child = os.fork()
    if child == 0:
        _save(url, 0.0, options)
        count = itertools.count(1)

        def die(**_: Any) -> None:
            if next(count) == request:
                os.kill(os.getpid(), signal.SIGKILL)

        session = AioSession()
        session.register("before-send.s3", die)
        _save(url, 1.0, {**options, "session": session})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def main(options: dict[str, Any], stride: int) -> None:
    """Sweep over the requests of a save that replaces another."""
    torch.set_num_threads(1)
    urls = []
    for request in itertools.count(1, stride):
        urls.append(f"s3://bucket/killed-{request}/step-1")
        if not _killed_save(urls[-1], request, options):
            break
    left = []
    for url in urls:  # after the last fork: a store's client starts a thread
        assert latest(url.rpartition("/")[0], storage_options=options) == url
        left.append({0.0: "old", 1.0: "new"}[_value_in(url, options)])
        _save(url, 2.0, options)
        assert _value_in(url, options) == 2.0
    print(json.dumps(left))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
