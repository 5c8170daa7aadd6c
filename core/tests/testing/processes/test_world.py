from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

from shard_core.errors import LaunchError, RankFailed
from shard_core.testing.processes.world import World


def _rank_and_sum(addend):
    total = torch.tensor([dist.get_rank() + addend])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _environment():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"]
    return [os.environ[name] for name in names], dist.is_torchelastic_launched()


def _process():
    return os.getpid()


def _hash():
    return hash("a word")


def _draw():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def _disturb():
    os.environ["SHARD_STRATEGY"] = "left over"
    os.environ.pop("RANK")
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(dist.get_rank())


def _look():
    return (
        os.environ.get("SHARD_STRATEGY"),
        int(os.environ["RANK"]) == dist.get_rank(),
        os.getcwd() != "/",
        torch.get_default_dtype() is torch.float32,
        torch.is_grad_enabled(),
    )


def _raise_on_1_while_0_waits():
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def _all_raise_in_turn():
    time.sleep(0.2 * (dist.get_world_size() - dist.get_rank()))
    raise ValueError(f"rank {dist.get_rank()} gives up")


def _one_raises_in_step():
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError("only one")


def _skip_a_collective_on_1():
    if dist.get_rank() == 1:
        raise ValueError("before the broadcast")
    dist.broadcast(torch.ones(1), src=0)


def _sleep_here_on_1():
    if dist.get_rank() == 1:
        time.sleep(1000)


def _exit_on_0(code):
    if dist.get_rank() == 0:
        print("last words", flush=True)
        os._exit(code)
    dist.barrier()


def _system_exit():
    raise SystemExit(3)


def _destroy_group():
    dist.destroy_process_group()


def _return_what_cannot_travel():
    return lambda: None


def _tensor():
    return torch.arange(3) + dist.get_rank()


def test_results_come_in_rank_order_and_ranks_can_talk(worlds):
    assert worlds(2).run(_rank_and_sum, 10) == [(0, 21), (1, 21)]


def test_a_world_of_one_is_a_process_of_its_own(worlds):
    assert worlds(1).run(_rank_and_sum, 5) == [(0, 5)]
    assert worlds(1).run(_process) != [os.getpid()]


def test_the_environment_is_that_of_torchrun(worlds):
    (first, first_elastic), (second, second_elastic) = worlds(2).run(_environment)
    assert first == ["0", "0", "2", "2", "1"]
    assert second == ["1", "1", "2", "2", "1"]
    assert first_elastic
    assert second_elastic


def test_ranks_live_on(worlds):
    world = worlds(2)
    before = world.run(_process)
    for _ in range(5):
        assert world.run(_process) == before
    assert worlds(2) is world


def test_tensors_come_back(worlds):
    assert [t.tolist() for t in worlds(2).run(_tensor)] == [[0, 1, 2], [1, 2, 3]]


def test_ranks_hash_words_differently_as_processes_do(worlds):
    first, second = worlds(2).run(_hash)
    assert first != second


def test_every_call_draws_the_same_random_numbers(worlds):
    first = worlds(2).run(_draw)
    assert first[0] == first[1]
    assert worlds(2).run(_draw) == first


def test_what_a_function_changes_is_undone(worlds):
    worlds(2).run(_disturb)
    assert worlds(2).run(_look) == [(None, True, True, True, True)] * 2


def test_a_raise_comes_with_its_own_traceback_and_does_not_wait_for_the_timeout(worlds):
    start = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        worlds(2).run(_raise_on_1_while_0_waits, timeout=60)
    assert time.monotonic() - start < 30
    message = str(failure.value)
    assert message.index("rank 1 raised:") < message.index("rank 0 did not return")
    assert "ValueError: the cause" in message
    assert 'raise ValueError("the cause")' in message
    assert "rank 1 was here" in message
    assert "in _raise_on_1_while_0_waits" in message[message.index("rank 0 did not return") :]
    assert "serve" not in message[: message.index("rank 0 did not return")]
    assert worlds(2).run(_rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_the_first_cause_comes_first(worlds):
    with pytest.raises(RankFailed) as failure:
        worlds(2).run(_all_raise_in_turn)
    message = str(failure.value)
    assert "failed on 2 of 2 ranks" in message
    assert message.index("rank 1 gives up") < message.index("rank 0 gives up")


@pytest.mark.parametrize("function", [_all_raise_in_turn, _one_raises_in_step, _system_exit])
def test_ranks_in_step_survive_a_failure(worlds, function):
    before = worlds(2).run(_process)
    with pytest.raises(RankFailed):
        worlds(2).run(function)
    assert worlds(2).run(_process) == before


def test_ranks_out_of_step_are_replaced(worlds):
    before = worlds(2).run(_process)
    with pytest.raises(RankFailed, match="before the broadcast"):
        worlds(2).run(_skip_a_collective_on_1)
    assert set(worlds(2).run(_process)).isdisjoint(before)
    assert worlds(2).run(_rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_a_hung_rank_is_named_with_its_place_and_replaced(worlds):
    before = worlds(2).run(_process)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"failed on 1 of 2 ranks.\n\nrank 1 did not return within 1 s") as failure:
        worlds(2).run(_sleep_here_on_1, timeout=1)
    assert time.monotonic() - start < 30
    assert "in _sleep_here_on_1" in str(failure.value)
    assert set(worlds(2).run(_process)).isdisjoint(before)


def test_a_rank_that_dies_comes_first_with_exit_code_and_last_words(worlds):
    start = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        worlds(2).run(_exit_on_0, 7, timeout=60)
    assert time.monotonic() - start < 30
    message = str(failure.value)
    assert message.index("rank 0 died with exit code 7\nIt printed:\nlast words") < message.index("rank 1 ")
    assert worlds(2).run(_rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_a_rank_that_dies_between_runs_is_noticed(worlds):
    os.kill(worlds(2).run(_process)[1], 9)
    with pytest.raises(RankFailed, match="rank 1 died with exit code -9"):
        worlds(2).run(_rank_and_sum, 0)
    assert worlds(2).run(_rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_destroying_the_group_is_a_failure(worlds):
    with pytest.raises(RankFailed, match="default process group was destroyed"):
        worlds(2).run(_destroy_group)
    assert worlds(2).run(_rank_and_sum, 0) == [(0, 1), (1, 1)]


def test_a_function_without_a_name_is_refused_with_a_sentence(worlds):
    with pytest.raises(LaunchError, match="define it at the top of a module"):
        worlds(1).run(lambda: None)


def test_a_result_that_cannot_travel_is_a_failure_of_its_rank(worlds):
    with pytest.raises(RankFailed, match="lambda"):
        worlds(1).run(_return_what_cannot_travel)


def test_closing_ends_the_ranks():
    with World(1) as world:
        (process,) = world.run(_process)
        assert _alive(process)
    assert not _alive(process)


def test_ranks_do_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys\n"
        "from shard_core.testing.processes.world import World\n"
        "if __name__ == '__main__':\n"
        "    print(World(1).run(os.getpid)[0], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    rank = int(done.stdout)
    deadline = time.monotonic() + 10
    while _alive(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(rank)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    return not (status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z")
