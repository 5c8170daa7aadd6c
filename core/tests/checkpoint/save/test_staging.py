"""A snapshot holds what was there when it was taken, or names what was changed too early."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.single_rank import state_of
from torch import nn

from shard_core.checkpoint.save.staging import Snapshot, Staging
from shard_core.checkpoint.state.filtered import FilteredState
from shard_core.checkpoint.state.shard import TensorShard
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.errors import CheckpointError


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW([{"params": module.parameters(), "lr": torch.tensor(0.1)}])
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


def bits(snapshot: Any) -> dict[str, torch.Tensor]:
    return {shard.key: shard.view.detach().clone() for shard in snapshot.shards()}


def test_it_is_of_the_moment_it_was_taken() -> None:
    module, optimizer = stepped()
    state = state_of(module, optimizer)
    values = {"step": 3, "seen": torch.arange(3.0), "deep": {"list": [1, (2, torch.ones(1))]}}
    before, record = bits(state), state.optimizers()["optimizer"].to_json("optimizer")
    keys = [shard.key for shard in state.shards()]
    snapshot = Snapshot(state, values, rank=0)
    snapshot.take()
    values["seen"].zero_()
    values["deep"]["list"].append(5)
    module(torch.randn(4, 3))  # changes the buffers
    optimizer.param_groups[0]["lr"].fill_(7.0)
    snapshot.stage()
    optimizer.step()
    assert [shard.key for shard in snapshot.shards()] == keys
    for key, tensor in bits(snapshot).items():
        assert torch.equal(tensor, before[key]), key
    assert snapshot.optimizers()["optimizer"].to_json("optimizer") == record
    assert snapshot.values["seen"].tolist() == [0.0, 1.0, 2.0]
    assert snapshot.values["deep"]["list"][1] == (2, torch.ones(1))
    assert len(snapshot.values["deep"]["list"]) == 2
    with pytest.raises(CheckpointError, match="a snapshot can only be saved"):
        snapshot.prepare_load([])


@torch.no_grad()
def _through_a_view(module: Any, optimizer: Any) -> None:
    module[0].weight.detach()[0].mul_(2.0)


@torch.no_grad()
def _state(module: Any, optimizer: Any) -> None:
    optimizer.state[module[0].weight]["exp_avg"].zero_()
    optimizer.state[module[0].bias]["exp_avg"].zero_()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda module, optimizer: nn.init.zeros_(module[0].weight), "'model.0.weight' was changed before the save"),
        (_through_a_view, r"'model.0.weight' was changed before the save had copied it; wait for the handle's staged"),
        (_state, r"'optim.0.weight.exp_avg' and 1 more were changed before"),
        (lambda module, optimizer: optimizer.step(), r"'model.0.weight' and 11 more were changed before"),
    ],
)
def test_what_is_changed_too_early_is_named(change: Callable[..., Any], named: str) -> None:
    module, optimizer = stepped()
    snapshot = Snapshot(state_of(module, optimizer), {}, rank=0)
    snapshot.take()
    change(module, optimizer)
    with pytest.raises(CheckpointError, match=named):
        snapshot.stage()


def test_tensors_whose_changes_nobody_counts_are_copied_at_once() -> None:
    with torch.inference_mode():
        module = nn.Linear(2, 1, bias=False)
    before = module.weight.detach().clone()
    snapshot = Snapshot(state_of(module), {}, rank=0)
    snapshot.take()
    with torch.inference_mode():
        module.weight.zero_()
    snapshot.stage()
    assert torch.equal(snapshot.shards()[0].view, before)


def test_what_other_ranks_save_takes_no_room() -> None:
    module, optimizer = stepped()
    live = TensorState({"model": module}, {"optimizer": optimizer}, rank=1, world_size=2)
    snapshot = Snapshot(live, {"seen": torch.ones(3)}, rank=1)
    snapshot.take()
    snapshot.stage()
    for shard, kept in zip(live.shards(), snapshot.shards(), strict=True):
        assert (kept.key, kept.box, kept.write, kept.view.dtype) == (
            shard.key,
            shard.box,
            shard.write,
            shard.view.dtype,
        )
        assert kept.view.is_meta is not shard.write
    assert snapshot.values["seen"].is_meta


class Fetched(TensorState):
    """Lists copies it has fetched from a device."""

    holds_copies = True

    def shards(self) -> list[TensorShard]:
        return [
            TensorShard(key=each.key, shape=each.shape, offsets=each.offsets, view=each.view.clone(), write=each.write)
            for each in super().shards()
        ]


def test_what_is_a_copy_already_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = stepped()
    live = FilteredState(Fetched({"model": module}, {"optimizer": optimizer}, rank=0, world_size=2), bool)
    monkeypatch.setattr(Staging, "now", None)
    monkeypatch.setattr(Staging, "later", None)
    snapshot = Snapshot(live, {}, rank=0)
    snapshot.take()
    snapshot.stage()
    for shard, kept in zip(live.shards(), snapshot.shards(), strict=True):
        assert kept.view.is_meta is not shard.write
        assert not shard.write or torch.equal(kept.view, shard.view)


_PEAK = """
import sys, torch
from pathlib import Path
from shard_core import get_strategy


def mebibytes(what):
    # What getrusage() knows of a peak was seen before this program began, too, and is then the parent's.
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[what].split()[0]) / 1024


strategy = get_strategy("single", accelerator="cpu")
model = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(25))  # 100 MiB
model = strategy.setup_module(model)
strategy.save_checkpoint(sys.argv[1] + "/first", {"step": 1}, blocking=False).wait()
now = mebibytes("VmRSS")
for step in range(2):
    strategy.save_checkpoint(sys.argv[1] + "/" + str(step), {"model": model}, blocking=False)
strategy.teardown()
print(mebibytes("VmHWM") - now)
"""


def test_it_takes_the_room_of_what_this_rank_saves_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert 95 < float(done.stdout) < 125, done.stdout


def test_copies_stay_as_they_were() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    copies = Staging()
    now, later = copies.now(tensor), copies.later(tensor)
    copies.finish()
    tensor.zero_()
    assert now.tolist() == later.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert now.is_contiguous()


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]  # a property of every tensor
    device = torch.device("cuda", 1)  # type: ignore[assignment]


class Stream:
    """Stands in for a CUDA stream, and for its events: writes down what it is asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> "Stream":
        self.log.append(f"event of {self.name}")
        return Stream(f"event of {self.name}", self.log)

    def wait_event(self, event: "Stream") -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


@pytest.fixture
def device_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is asked of a CUDA device, which torch for CPUs alone has not, in order."""
    log: list[str] = []
    streams = [Stream("training", log)]
    empty, copy = torch.empty, torch.Tensor.copy_

    @contextlib.contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    def make(*shape: Any, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        log.append(f"pinned={pin_memory} on {streams[-1].name}")
        return empty(*shape, **given)

    def fill(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        log.append(f"copy on {streams[-1].name}, non_blocking={non_blocking}")
        return copy(into, source.as_subclass(torch.Tensor))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(f"side stream of {device}", log))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(torch.Tensor, "copy_", fill)
    return log


def test_what_can_wait_is_copied_from_a_device_beside_training(device_log: list[str]) -> None:
    tensor = torch.ones(2).as_subclass(OnDevice)
    copies = Staging()
    copies.now(tensor)
    copies.later(tensor)
    copies.later(tensor)
    copies.finish()
    side = "side stream of cuda:1"
    assert device_log == [
        "event of training",
        *("pinned=True on training", "copy on training, non_blocking=True", "event of training"),
        f"{side} waits for event of training",
        *(f"pinned=True on {side}", f"copy on {side}, non_blocking=True") * 2,
        *("host waits for event of training", f"host waits for {side}"),
    ]
