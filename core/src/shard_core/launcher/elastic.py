"""The launcher that starts ranks on this host, by torch's own elastic agent."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from shard_core.launcher.failure import launch_error
from shard_core.launcher.interface import Launcher
from shard_core.launcher.loopback import loopback_only
from shard_core.launcher.pickling import check_importable, check_picklable, refuse_unguarded
from shard_core.launcher.rank_call import RankCall, read_result, run_rank
from shard_core.launcher.watch import Watch

if TYPE_CHECKING:
    from torch.distributed.launcher import LaunchConfig

# The agent logs what it does and what failed; the launcher reports it once, in words of its own.
_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.multiprocessing.redirects",
    "torch.distributed.launcher.api",
    "torch.multiprocessing.spawn",
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ElasticLauncher(Launcher):
    """Starts local ranks, runs the same call on each, and ends all of them if one fails.

    A rank that has finished leaves a few seconds later, whatever the others do: one that waits for it in a collective
    can never be served, and fails then.

    New processes are spawned: each imports the script again, so the script guards its launch with
    ``if __name__ == "__main__"``.

    Args:
        num_processes: How many ranks.
    """

    def __init__(self, *, num_processes: int) -> None:
        self.num_processes = num_processes

    def __repr__(self) -> str:
        """Return how it was built."""
        return f"{type(self).__name__}(num_processes={self.num_processes})"

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` on every rank and return what rank 0 returned.

        Args:
            function: A function at the top level of a module.
            args: Arguments that can be pickled.

        Returns:
            Rank 0's result.

        Raises:
            LaunchError: If the function, an argument or the result cannot be pickled.
            RankFailed: If a rank raised or died: the first one, with its own traceback.
        """
        refuse_unguarded()
        check_importable(function, *args)
        with tempfile.TemporaryDirectory(prefix="shard-launch-", ignore_cleanup_errors=True) as folder:
            self._run_agent(RankCall(folder=folder, function=function, args=args))
            return read_result(folder)

    def _run_agent(self, call: RankCall) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher import elastic_launch

        watch = Watch(call.folder, self.num_processes)
        try:
            with _own_environment(self.num_processes), loopback_only(), watch:
                elastic_launch(self._config(call.folder), run_rank)(call)
        except ChildFailedError as error:
            seen = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise launch_error(call.folder, self.num_processes, seen, watch.deaths) from None
        except SignalException as stopped:
            if watch.woke_agent:
                raise launch_error(call.folder, self.num_processes, {}, watch.deaths) from None
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            # The agent took the signal to end the ranks first; now it means what it meant before.
            signal.raise_signal(stopped.sigval)
            raise SystemExit(128 + stopped.sigval) from None
        except Exception:
            check_picklable(call.function, *call.args)
            raise

    def _config(self, folder: str) -> LaunchConfig:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher import LaunchConfig

        from shard_core.launcher.rendezvous import loopback_rendezvous

        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend=loopback_rendezvous(),
            rdzv_endpoint="localhost:0",
            # Else the agent asks the name service for this host's full name, which can take long to fail.
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )


@contextlib.contextmanager
def _own_environment(num_processes: int) -> Iterator[None]:
    """Set what the agent and the ranks take from this process, and put everything back."""
    names = ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_SIGNALS_TO_HANDLE")
    variables = {name: os.environ.get(name) for name in names}
    # Every rank would start a thread per core, and they would fight for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // num_processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    # Only the main thread may set handlers; elsewhere the agent sets none either.
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {each: signal.getsignal(each) for each in _SIGNALS} if in_main else {}
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _cores() -> int:
    """Count the cores this process may use, which in a container can be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
