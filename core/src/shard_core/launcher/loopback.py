"""Ranks of one host alone: their launcher gives them a secret, and they connect over the loopback interface."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator

from shard_core.coordinator import SECRET_VARIABLE

# Linux and the BSDs, of which macOS is one, name it so.
_LOOPBACK_NAMES = ("lo", "lo0")


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Set what ranks started inside take from the environment, and put everything back; what a user has set stays.

    They get a secret by which each knows that a message comes from another, and gloo and NCCL are set to listen where
    no other host can connect.
    """
    names = {SECRET_VARIABLE: secrets.token_hex(32), **_interfaces()}
    added = [name for name in names if name not in os.environ]
    os.environ.update({name: names[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _interfaces() -> dict[str, str]:
    """Return the variables that set the interface of gloo and NCCL; none where no loopback of a known name exists."""
    found = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_NAMES]
    if not found:
        return {}
    return {"GLOO_SOCKET_IFNAME": found[0], "NCCL_SOCKET_IFNAME": f"={found[0]}"}  # "=": no other that begins so
