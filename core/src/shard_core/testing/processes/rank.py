"""One rank of a test world: takes functions from its parent, runs them, and hands back what came of them."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import io
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What one rank has to say about one request.

    Attributes:
        value: The return value as ``torch.save`` writes it; empty if the function raised.
        error: The traceback as text; empty if the function returned.
        at: When it ended, on the clock all processes of a host share.
    """

    value: bytes = b""
    error: str = ""
    at: float = dataclasses.field(default_factory=time.monotonic)


def serve(descriptor: int) -> None:
    """Join the world that the environment describes and run requests until the parent goes away.

    Args:
        descriptor: This end of the pipe to the parent.
    """
    faulthandler.enable()
    # Dumping from C, on a signal, works even where the hung call holds the interpreter's lock.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests), daemon=True).start()
    _join_group()
    environment = dict(os.environ)
    folder = os.getcwd()
    loaded = _keep_modules(0)
    connection.send_bytes(pickle.dumps(Reply()))
    while True:
        request = requests.get()
        _reset(environment, folder)
        reply = _run(request)
        gc.collect()  # a strategy left in a cycle must not meet the next test
        loaded = _keep_modules(loaded)
        connection.send_bytes(pickle.dumps(reply))


def _keep_modules(loaded: int) -> int:
    """Freeze what has been imported since: later garbage collections then look only at what a run left."""
    if len(sys.modules) > loaded:
        gc.freeze()
    return len(sys.modules)


def _listen(connection: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    """Queue what the parent sends; when it closes the pipe or dies, end even a rank that hangs."""
    try:
        while True:
            requests.put(connection.recv_bytes())
    except (EOFError, OSError):
        # Leaving past the interpreter's shutdown: gloo's threads can abort a process that exits normally.
        os._exit(0)


def _join_group() -> None:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Where there are devices for all, tensors on them go as they do in training; NCCL takes one rank for each.
    over_nccl = dist.is_nccl_available() and size <= torch.cuda.device_count()
    dist.init_process_group("cpu:gloo,cuda:nccl" if over_nccl else "gloo", store=store, rank=rank, world_size=size)


def _reset(environment: dict[str, str], folder: str) -> None:
    """Undo what an earlier function may have changed in this process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_default_dtype(torch.float32)
    if torch.get_default_device().type != "cpu":  # asked first: torch 2.9 loses it once it was set to None
        torch.set_default_device("cpu")
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    if torch.are_deterministic_algorithms_enabled():  # asked first: setting it imports the compiler
        torch.use_deterministic_algorithms(False)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _packed(value: Any) -> bytes:
    """Pack what a function returned, with all its tensors at once: pickling them takes longer one by one."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _run(request: bytes) -> Reply:
    try:
        path, payload = pickle.loads(request)
        sys.path[:] = path
        function, args = pickle.loads(payload)
        value: Any = function(*args)
        if not dist.is_initialized():
            return Reply(error="The default process group was destroyed; whoever joins a group leaves it be.\n")
        return Reply(value=_packed(value))
    except BaseException as error:  # noqa: BLE001 - whatever ends the function is the test's failure
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return Reply(error="".join(traceback.format_exception(type(error), error, frames)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
