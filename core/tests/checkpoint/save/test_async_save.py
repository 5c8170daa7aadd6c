"""An async save writes what a blocking save would have, or raises why not."""

import os
import platform
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from async_saves import Held, digests, limited_files, ready, saves_twice, train
from fixtures.scripts import environment

from shard_core import get_strategy
from shard_core.checkpoint.async_io import AsyncCheckpointIO
from shard_core.checkpoint.format.folder import latest
from shard_core.checkpoint.format.manifest import Manifest
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.retention.policy import Retention
from shard_core.checkpoint.save import host_memory
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.storage.opening import absolute
from shard_core.collectives.interface import Collectives
from shard_core.collectives.single import SingleCollectives
from shard_core.errors import CheckpointError, InvalidOption, MissingCapability, RankFailed
from shard_core.testing.processes.world import World

WARNING = (
    f"host {platform.node()!r} has no room for the 0.0 GB that its ranks would copy; async saves write "
    "straight from the tensors instead, and training waits for them."
)


@pytest.mark.parametrize("form", [None, "full"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("size", [1, 2])
def test_it_writes_the_bits_of_the_moment_it_was_called(
    worlds: Any, tmp_path: Path, size: int, optimizer: str, form: str | None
) -> None:
    for waiting, going_on in worlds(size).run(saves_twice, "ddp", optimizer, tmp_path, form):
        assert waiting == going_on
        assert len(waiting) > 1
    assert verify(tmp_path / "going-on").is_fine


def single(**options: Any) -> tuple[Any, dict[str, Any]]:
    strategy = get_strategy("single", accelerator="cpu", **options)
    return strategy, ready(strategy)


def test_the_part_that_saves_says_what_is_done_by_default(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for io, blocking, waits in [
        (AsyncCheckpointIO(Held(gate)), None, False),
        (AsyncCheckpointIO(Held(gate)), True, True),
        (Held(gate), False, False),
        (Held(gate), None, True),
    ]:
        strategy, state = single(checkpoint_io=io)
        handle = strategy.save_checkpoint(tmp_path / "c", state, blocking=blocking)
        assert handle.committed.done() is waits
        gate.touch()
        handle.wait()
        gate.unlink()
        strategy.teardown()


def test_where_memory_has_no_room_for_a_copy_training_waits_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    strategy, state = single(checkpoint_io=Held(gate))
    wanted = 4 * sum(parameter.numel() for parameter in state["model"].parameters())
    for available, waits in [(10 * wanted, False), (None, False), (wanted, True)]:
        monkeypatch.setattr(host_memory, "available_memory", lambda available=available: available)
        if waits:
            gate.touch()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for name in ("first", "second"):
                handle = strategy.save_checkpoint(tmp_path / f"{name}-{available}", state, blocking=False)
                assert handle.committed.done() is waits
                gate.touch()
                handle.wait()
                assert waits or gate.unlink() is None
        assert [str(each.message) for each in caught] == ([WARNING] if waits else [])
    strategy.teardown()
    first, second = (digests(tmp_path / f"first-{available}") for available in (10 * wanted, wanted))
    assert first == second
    assert verify(tmp_path / f"second-{wanted}").is_fine


def test_one_save_is_under_way_at_a_time(tmp_path: Path) -> None:
    gate, before = tmp_path / "gate", tmp_path / "run" / "before"
    for call in (
        lambda strategy, state: strategy.save_checkpoint(tmp_path / "next", state, blocking=False),
        lambda strategy, state: strategy.save_checkpoint(tmp_path / "next", state),
        lambda strategy, state: strategy.load_checkpoint(before, state),
        lambda strategy, state: strategy.latest_checkpoint(tmp_path / "run"),
        lambda strategy, state: strategy.teardown(),
    ):
        strategy, state = single(checkpoint_io=Held(gate))
        handle = strategy.save_checkpoint(before, state, blocking=False)
        for _ in range(3):
            train(strategy, state)
        assert not handle.committed.done()
        opener = threading.Timer(0.2, gate.touch)
        opener.start()
        call(strategy, state)
        assert handle.committed.done()
        opener.join()
        strategy.teardown()
        gate.unlink()


def save_and_go_elsewhere(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    before = Path.cwd()
    try:
        with get_strategy("ddp") as strategy:
            state = ready(strategy)
            os.chdir(folder)
            handle = strategy.save_checkpoint("relative", state, blocking=False)
            os.chdir(elsewhere)
            handle.wait()
    finally:
        os.chdir(before)


def test_a_relative_path_begins_where_the_process_was_when_it_saved(worlds: Any, tmp_path: Path) -> None:
    worlds(2).run(save_and_go_elsewhere, tmp_path)
    assert verify(tmp_path / "relative").is_fine
    assert not list((tmp_path / "elsewhere").iterdir())


def save_through_others_and_go_elsewhere(folder: Path) -> None:
    elsewhere, gate, before = folder / "elsewhere", folder / "gate", Path.cwd()
    elsewhere.mkdir(exist_ok=True)
    try:
        for path, blocking, checkpoint_io in (
            ("asked", False, Held(gate)),
            (Path("run", "by_itself"), None, AsyncCheckpointIO(Held(gate))),
        ):
            with get_strategy("ddp", checkpoint_io=checkpoint_io) as strategy:
                state = ready(strategy)
                os.chdir(folder)
                handle = strategy.save_checkpoint(path, state, blocking=blocking)
                os.chdir(elsewhere)
                gate.touch()
                handle.wait()
                strategy.barrier()
                gate.unlink(missing_ok=True)
    finally:
        os.chdir(before)


def test_a_checkpoint_io_of_somebody_else_is_given_an_absolute_path(worlds: Any, tmp_path: Path) -> None:
    worlds(2).run(save_through_others_and_go_elsewhere, tmp_path)
    assert verify(tmp_path / "asked").is_fine
    assert verify(tmp_path / "run" / "by_itself").is_fine
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_url_is_given_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for left in ("s3://bucket/run", "simplecache::s3://bucket/run", "s3:/bucket/run", "/run/step-1", Path("/run")):
        assert absolute(left) is left
    assert absolute("run") == str(tmp_path / "run")
    assert absolute(Path("run")) == tmp_path / "run"


def test_what_comes_next_to_a_failed_save_raises_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for call in (
        lambda strategy, state: [train(strategy, state) or time.sleep(0.01) for _ in range(500)],
        lambda strategy, state: strategy.save_checkpoint(tmp_path / "next", state),
        lambda strategy, state: strategy.load_checkpoint(tmp_path / "next", state),
        lambda strategy, state: strategy.latest_checkpoint(tmp_path / "run"),
        lambda strategy, state: strategy.teardown(),
    ):
        strategy, state = single()
        strategy.save_checkpoint(tmp_path / "file" / "below", state, blocking=False)
        with pytest.raises(CheckpointError, match="a part of it is a file"):
            call(strategy, state)
        assert not (tmp_path / "next").exists()
        strategy.save_checkpoint(tmp_path / "after", {"step": 1}, blocking=False)
        strategy.teardown()
        assert verify(tmp_path / "after").is_fine


def test_a_failed_save_hides_no_error_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    strategy, state = single()

    def train_badly() -> None:
        with strategy:
            strategy.save_checkpoint(tmp_path / "file" / "below", state, blocking=False)
            raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        train_badly()
    assert "a part of it is a file" in error.value.__notes__[0]


def on_a_full_disk(folder: Path) -> tuple[int, str, str | None]:
    """Limit one rank's disk; return the step that raised, its message, and what there is afterwards."""
    with get_strategy("ddp") as strategy:
        state = ready(strategy)
        strategy.save_checkpoint(folder / "run" / "old", state)
        before = limited_files(1000 if strategy.global_rank == 1 else 10**9)
        try:
            strategy.save_checkpoint(folder / "run" / "new", state, blocking=False)
            for step in range(500):  # noqa: B007 - returned afterwards
                train(strategy, state)
                time.sleep(0.005 * strategy.global_rank)
        except CheckpointError as error:
            found = strategy.latest_checkpoint(folder / "run")
            return step, str(error), found and found.name
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return -1, "", None


def test_a_disk_that_is_full_on_one_rank_is_told_on_all_at_the_same_step(worlds: Any, tmp_path: Path) -> None:
    first, second = worlds(2).run(on_a_full_disk, tmp_path)
    assert first == second
    step, said, found = first
    assert step >= 0
    assert "failed on 1 of 2 ranks: rank 1: OSError: [Errno 27] File too large" in said
    assert found == "old"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["old"]


def test_what_no_checkpoint_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    strategy, state = single()
    with pytest.raises(CheckpointError, match=r"'odd' is a builtins.object"):
        strategy.save_checkpoint(tmp_path / "c", {**state, "odd": object()}, blocking=False)
    with pytest.raises(InvalidOption, match="state_dict_type 'ful' is none of: sharded, full; did you mean 'full'"):
        strategy.save_checkpoint(tmp_path / "c", state, state_dict_type="ful", blocking=False)
    with pytest.raises(InvalidOption, match="inner is 3; give a CheckpointIO"):
        AsyncCheckpointIO(3)
    assert not (tmp_path / "c").exists()
    strategy.teardown()


class Mute(SingleCollectives):
    """Collectives without a side channel."""

    side_channel = Collectives.side_channel


def test_collectives_that_cannot_talk_behind_training_say_so(tmp_path: Path) -> None:
    strategy, state = single(collectives=Mute())
    with pytest.raises(MissingCapability, match="Mute cannot talk in the background; save with blocking=True"):
        strategy.save_checkpoint(tmp_path / "c", state, blocking=False)
    strategy.save_checkpoint(tmp_path / "c", state)
    strategy.teardown()


def test_only_what_is_chosen_is_copied_and_old_checkpoints_go(tmp_path: Path) -> None:
    io = AsyncCheckpointIO(ShardedCheckpointIO(retention=Retention(keep_last=2)))
    strategy, state = single(checkpoint_io=io)
    for step in range(4):
        train(strategy, state)
        strategy.save_checkpoint(
            tmp_path / str(step), {**state, "step": step}, filter=lambda key: key.startswith("model.first.")
        )
    strategy.teardown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    saved = Manifest.from_bytes((tmp_path / "3" / "manifest.json").read_bytes())
    keys = [tensor.key for tensor in saved.tensors]
    assert [key for key in keys if key.startswith("model.")] == ["model.first.bias", "model.first.weight"]


def run(script: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(),
        **options,
        check=False,
    )


_ENDS_AT_ONCE = """
    import sys
    from pathlib import Path
    from async_saves import ready
    from shard_core import get_strategy

    strategy = get_strategy("single", accelerator="cpu")
    strategy.save_checkpoint(Path(sys.argv[1]), ready(strategy), blocking=False)
    {end}
"""


def test_a_process_that_ends_completes_its_save_first(tmp_path: Path) -> None:
    done = run(_ENDS_AT_ONCE.format(end="raise KeyError('mine')"), tmp_path / "run" / "c")
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'mine'\n")
    assert latest(tmp_path / "run") == tmp_path / "run" / "c"
    assert verify(tmp_path / "run" / "c").is_fine


def test_a_process_that_ends_with_a_failed_save_says_so_and_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(_ENDS_AT_ONCE.format(end="print('the end')"), tmp_path / "file" / "c")
    assert done.returncode == 1
    assert done.stdout == "the end\n"
    assert done.stderr.startswith("A save in the background failed: ")
    assert "a part of it is a file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def loses_a_rank(folder: Path) -> None:
    """Kill rank 1 while a save is under way."""
    strategy = get_strategy("ddp", guard_timeout=timedelta(seconds=1))
    strategy.setup_environment()
    state = ready(strategy)
    strategy.save_checkpoint(folder / "old", state)
    io = Held(folder / f"gate-{strategy.global_rank}")
    strategy.checkpoint_io = io
    handle = strategy.save_checkpoint(folder / "new", state, blocking=False)
    if strategy.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    io.gate.touch()
    begun = time.monotonic()
    try:
        handle.wait()
    finally:
        print(f"waited {time.monotonic() - begun:.0f} s")


def test_a_rank_that_dies_is_named_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    with World(2) as world, pytest.raises(RankFailed, match="rank 0 heard nothing of rank 1 for 1 s") as failure:
        world.run(loses_a_rank, tmp_path)
    waited = re.search(r"waited (\d+) s", str(failure.value))
    assert waited is not None
    assert 1 <= int(waited[1]) < 20
    assert latest(tmp_path) == tmp_path / "old"
    assert verify(tmp_path / "old").is_fine
