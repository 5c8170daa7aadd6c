"""Ranks that have one CUDA device among them are told so, all of them, before NCCL waits; torch is faked."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shard_core.collectives.device_claims import check_one_rank_per_device
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.collectives.roll_call import RollCall
from shard_core.errors import CollectiveError


class Group:
    """What ``torch.distributed`` is asked for where torch has no NCCL: no group is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.device_id: Any = "never asked for"
        monkeypatch.setattr(dist, "is_backend_available", lambda _: True)
        monkeypatch.setattr(dist, "init_process_group", self.make)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)

    def make(self, backend: str, **given: Any) -> None:
        self.device_id = given["device_id"]
        self.calls.append(("init_process_group", backend))

    def properties(self, device: torch.device) -> Any:
        self.calls.append(("get_device_properties", device))
        return SimpleNamespace(uuid=f"number {device.index}")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


@pytest.mark.parametrize("numbers", [(0, 1), (1, 1)], ids=["apart", "shared"])
def test_every_rank_is_told_who_shares_a_device(numbers: tuple[int, int], group: Group) -> None:
    del group
    store, told = dist.HashStore(), ["", ""]

    def claim(rank: int) -> None:
        roll_call = RollCall(dist.PrefixStore("calls", store), rank, 2, timedelta(seconds=20))
        device = torch.device("cuda", numbers[rank])
        try:
            check_one_rank_per_device(dist.PrefixStore("devices", store), rank, device, roll_call)
        except CollectiveError as error:
            told[rank] = str(error)

    ranks = [threading.Thread(target=claim, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if numbers == (0, 1):
        assert told == ["", ""]
    else:
        assert told[0] == told[1]
        assert "have one device, cuda:1 of rank" in told[0]
        assert "process_group_backend='gloo'" in told[0]


@pytest.mark.parametrize(
    ("backend", "device", "bound"),
    [
        (None, "cuda:3", "cuda:3"),
        ("nccl", "cuda:3", "cuda:3"),
        ("cpu:gloo,cuda:nccl", "cuda:3", "cuda:3"),
        ("gloo", "cuda:3", None),
        ("cpu:gloo,cuda:gloo", "cuda:3", None),
        (None, "cpu", None),
        ("cpu:gloo,cuda:nccl", "cpu", None),
    ],
)
def test_nccl_is_bound_to_this_ranks_device(backend: str | None, device: str, bound: str | None, group: Group) -> None:
    ProcessGroupCollectives(backend).connect(0, 1, torch.device(device))
    assert group.device_id == (torch.device(bound) if bound else None)


@pytest.mark.parametrize(("backend", "claims"), [(None, True), ("gloo", False)])
def test_devices_are_claimed_before_the_group_is_made(
    backend: str | None, claims: bool, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr("shard_core.collectives.process_group.shared_store", lambda *_: store)

    def connect(rank: int) -> None:
        ProcessGroupCollectives(backend).connect(rank, 2, torch.device("cuda", rank))

    other = threading.Thread(target=connect, args=(1,))
    other.start()
    connect(0)
    other.join()
    made = [place for place, (name, _) in enumerate(group.calls) if name == "init_process_group"]
    claimed = [place for place, (name, _) in enumerate(group.calls) if name == "get_device_properties"]
    assert len(made) == 2
    assert len(claimed) == (2 if claims else 0)
    assert not claimed or max(claimed) < min(made)
