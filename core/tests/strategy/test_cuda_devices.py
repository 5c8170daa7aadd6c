"""Each rank takes its own CUDA device, however launchers show them, before the ranks meet; torch is faked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shard_core import get_strategy
from shard_core.errors import LaunchError
from shard_core.launcher.interface import ProcessInfo
from shard_core.strategy.placement import Placement


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes torch see some devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


def placed(local_rank: int, ranks: int, **options: Any) -> Placement:
    place = ProcessInfo(
        source="SLURM",
        rank=local_rank,
        world_size=ranks,
        local_rank=local_rank,
        local_world_size=ranks,
        node_rank=0,
        main_address="127.0.0.1",
        main_port=29500,
    )
    strategy = get_strategy("ddp", accelerator="cuda", cluster_environment=place, **options)
    return Placement(strategy.options, strategy.info)


@pytest.mark.parametrize("options", [{}, {"devices": 4}, {"devices": [0, 1, 2, 3]}], ids=str)
def test_ranks_that_see_all_devices_take_that_of_their_local_rank(cuda: Any, options: dict[str, Any]) -> None:
    cuda(4)
    assert [placed(rank, 4, **options).device.index for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{}, {"devices": 4}], ids=str)
def test_ranks_that_see_one_device_each_take_it(cuda: Any, options: dict[str, Any]) -> None:
    """As tasks under ``srun --gpus-per-task=1`` do, or with CUDA_VISIBLE_DEVICES of their own."""
    cuda(1)
    places = [placed(rank, 4, **options) for rank in range(4)]
    assert [(place.device.index, place.local_rank, place.local_ranks) for place in places] == [
        (0, rank, 4) for rank in range(4)
    ]


@pytest.mark.parametrize("devices", [3, [0, 1, 2, 3]], ids=str)
def test_numbers_that_are_not_there_are_refused_all_the_same(cuda: Any, devices: Any) -> None:
    cuda(1)
    with pytest.raises(LaunchError, match="asks for device"):
        placed(0, 4, devices=devices)


def test_ranks_beyond_several_devices_are_refused_with_the_cure(cuda: Any) -> None:
    cuda(2)
    assert placed(1, 4).device.index == 1
    with pytest.raises(LaunchError, match=r"SLURM started 4 ranks on this host, but it has 2 cuda .*--gpus-per-task=1"):
        placed(2, 4)


def test_the_device_is_set_before_the_group_is_made_and_given_to_it(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(4)
    calls: list[tuple[str, Any]] = []
    make = dist.init_process_group

    def init_process_group(backend: str, *, device_id: Any, **given: Any) -> None:
        calls.append((f"init_process_group {backend}", device_id))
        make("gloo", **given)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    own = torch.device("cuda", 2)
    with get_strategy("ddp", parallel_devices=[own]) as strategy:
        assert strategy.root_device == own
        assert calls == [("set_device", own), ("init_process_group cpu:gloo,cuda:nccl", own)]
