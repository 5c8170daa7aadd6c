"""Ranks start, join, fail and hand back results."""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING

import pytest

from shard_core.testing.processes.early_scripts import Script
from shard_core.testing.rules import promise, promises_of
from shard_core.testing.suites.suite import Suite

if TYPE_CHECKING:
    from shard_core.testing.processes.early_scripts import EarlyScripts
    from shard_core.testing.selected_promises import Chosen

_OWN, _TORCHRUN = "own-ranks", "torchrun"
_RETURNS, _JOINS = "launch_returns_rank_zeros_result", "joins_torchrun"

#: What the rank that fails holds until it is dead.
_LOCK = "failing.lock"
#: How long the others may live on: far less than any rank would wait for another, far more than ending them takes.
_END_SECONDS = 40.0

_START = """\
import fcntl, json, os, pathlib, pickle, sys, threading
from shard_core import get_strategy
from shard_core.errors import LaunchError

HERE = pathlib.Path(__file__).parent
WAY = sys.argv[1]


def note(what, value):
    (HERE / f"{what}.json").write_text(json.dumps(value))


def strategy():
    return get_strategy(**pickle.loads((HERE / "options.pickle").read_bytes()))
"""

_WORKING = """

def work(strategy, start):
    total = strategy.all_reduce(float(start + strategy.global_rank), reduce_op="sum")
    note(f"ran-{strategy.global_rank}", os.getpid())
    return {"rank": strategy.global_rank, "total": float(total)}


def refusal(function, *args):
    try:
        return f"{strategy().launch(function, *args)} came back"
    except LaunchError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refusals():
    def inner(strategy):
        return "a closure"

    return {
        "lambda": refusal(lambda strategy: "a lambda"),
        "inner": refusal(inner),
        "lock": refusal(work, threading.Lock()),
    }


if __name__ == "__main__":
    result = strategy().launch(work, 7)
    note(f"returned-{os.environ.get('RANK', 'own')}", {"process": os.getpid(), "result": result})
    if WAY == "own-ranks":
        note("refusals", refusals())
"""

_FAILING = f"""
HELD = []


def hold():
    HELD.append((HERE / "lock").open("w"))
    fcntl.flock(HELD[0], fcntl.LOCK_EX)
    (HERE / "lock").rename(HERE / {_LOCK!r})


def fail_on_the_last_rank(strategy):
    if strategy.global_rank == strategy.world_size - 1:
        hold()
        note("raised", True)
        raise ValueError("the batch is empty")
    strategy.all_reduce(1.0)


if __name__ == "__main__":
    strategy().launch(fail_on_the_last_rank)
"""

_RUNS = ((_WORKING, _OWN), (_WORKING, _TORCHRUN), (_FAILING, _OWN))


class Launching(Suite):
    """Ranks start, join, fail and hand back results."""

    @pytest.fixture(autouse=True)
    def start_scripts(self, chosen: Chosen, early_scripts: EarlyScripts) -> None:
        """Start all scripts with the first promise of a class, whatever it is about, if a chosen one is about them."""
        if chosen.names & promises_of(Launching).keys():
            early_scripts.start(self._script(*run) for run in _RUNS)

    @promise(after=("construction_starts_nothing",), every_size=False)
    def test_launch_returns_rank_zeros_result(self, early_scripts: EarlyScripts) -> None:
        """A plain script's launch starts its own ranks, hands all the arguments, and returns what rank 0 returned.

        Usual cause:
            Results of all ranks come back as a list, the last rank's wins, or the arguments are lost on the way.
        """
        size = self.main_size()
        run = early_scripts.result(self._script(_WORKING, _OWN))
        expected = {"rank": 0, "total": float(sum(7 + rank for rank in range(size)))}
        assert "returned-own" in run.notes, f"launch() did not return: {run.outcome}"
        returned = run.notes["returned-own"]
        assert returned["result"] == expected, f"launch() returned {returned['result']!r}, it should be {expected!r}"
        processes = [run.notes.get(f"ran-{rank}") for rank in range(size)]
        assert len(set(processes)) == size, f"the ranks should be {size} processes, they ran in {processes}"
        if size == 1:
            assert processes == [returned["process"]], (
                "a world of one runs in the calling process, and this one did not"
            )

    @promise(after=("construction_starts_nothing",), every_size=False)
    def test_joins_torchrun(self, early_scripts: EarlyScripts) -> None:
        """Under torchrun the same script runs in the processes that exist; ranks other than 0 get None from launch.

        Usual cause:
            The launcher starts ranks of its own inside each of torchrun's, or counts devices instead of ranks.
        """
        run = early_scripts.result(self._script(_WORKING, _TORCHRUN))
        for rank in range(self.main_size()):
            returned = run.notes.get(f"returned-{rank}")
            assert returned, f"launch() did not return on rank {rank}: {run.outcome}"
            ran = run.notes.get(f"ran-{rank}")
            assert ran == returned["process"], f"rank {rank} is process {returned['process']}, but {ran} did its work"
            if rank > 0:
                assert returned["result"] is None, f"launch() returned {returned['result']!r} on rank {rank}"

    @promise(after=(_RETURNS, _JOINS), every_size=False)
    def test_exit_code_is_zero(self, early_scripts: EarlyScripts) -> None:
        """A script whose ranks all finish ends with exit code 0, with its own ranks as under torchrun.

        Usual cause:
            A thread of the engine is still running when the interpreter shuts down, and aborts the process.
        """
        for way in (_OWN, _TORCHRUN):
            outcome = early_scripts.result(self._script(_WORKING, way)).outcome
            assert outcome.exit_code == 0, f"with {way}, {outcome}"

    @promise(after=(_RETURNS,), every_size=False)
    def test_failing_rank_is_reported(self, early_scripts: EarlyScripts) -> None:
        """When a rank raises, its number and its own traceback are printed, all ranks end, and the exit code is not 0.

        Usual cause:
            The exception is swallowed or replaced on its way, or the other ranks wait for the one that is gone.
        """
        last = self.main_size() - 1
        run = early_scripts.result(self._script(_FAILING, _OWN))
        outcome = run.outcome
        assert "raised" in run.notes, f"rank {last} never came to raise: {outcome}"
        assert outcome.exit_code is not None, f"{_END_SECONDS:.0f} s after rank {last} died others live on: {outcome}"
        assert outcome.exit_code != 0, f"a rank raised, and {outcome}"
        for text in ("in fail_on_the_last_rank", "ValueError: the batch is empty"):
            assert text in outcome.errors, f"the traceback lacks {text!r}: {outcome}"
        named = re.search(rf"\brank\s*:?\s*{last}\b", outcome.errors)
        assert named or last == 0, f"nothing says that it was rank {last}: {outcome}"

    @promise(after=(_RETURNS,), every_size=False)
    def test_functions_that_cannot_travel_are_refused(self, early_scripts: EarlyScripts) -> None:
        """A lambda, a function inside another and what cannot be pickled get a LaunchError of one sentence.

        Usual cause:
            They are handed to new processes unseen and fail there; or they run where no ranks were started. In a
            world of one nothing travels, and they run.
        """
        answers = early_scripts.result(self._script(_WORKING, _OWN)).notes.get("refusals", {})
        if self.main_size() == 1:
            assert answers.get("lambda") == "a lambda came back", f"in a world of one, a lambda runs: {answers}"
            return
        for what in ("lambda", "inner", "lock"):
            message = answers.get(what, "")
            assert "cannot" in message, f"the answer to the {what} is no LaunchError that explains it: {message!r}"
            assert what in message, f"the error does not name the {what}: {message}"
            assert "\n" not in message, f"the error about the {what} is more than a sentence: {message}"

    def _script(self, program: str, way: str) -> Script:
        size = self.main_size()
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
        return Script(
            text=_START + program,
            launcher=torchrun if way == _TORCHRUN else (),
            arguments=(way,),
            pickled=pickle.dumps({**self.subject.options, "name": self.strategy, "devices": size}),
            environment=tuple(self.environment.items()),
            dies=_LOCK if program == _FAILING else "",
            survives=_END_SECONDS,
        )
