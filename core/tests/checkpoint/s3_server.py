"""A server of the S3 protocol on this host, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

_START_SECONDS = 60.0


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Start a server with an empty bucket named ``bucket``, and give the storage options for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(server, port)
        client = {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "eu-west-1"}
        options = {"key": "somebody", "secret": "something", "client_kwargs": client}
        import s3fs

        s3fs.S3FileSystem(**options).mkdir("bucket")
        yield options
    finally:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, "the S3 server ended by itself"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError("the S3 server did not start")
