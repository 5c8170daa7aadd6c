"""Messages that only ranks of one run can have sent: a secret they share, and a code under it on each message."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
from typing import TYPE_CHECKING

from shard_core.collectives.serialization import deserialize, serialize
from shard_core.coordinator import SECRET_VARIABLE
from shard_core.errors import CollectiveError

if TYPE_CHECKING:
    import torch.distributed as dist

    from shard_core.collectives.roll_call import RollCall

log = logging.getLogger(__name__)

_UNSIGNED, _SIGNED = b"\0", b"\1"
_CODE_BYTES = hashlib.sha256().digest_size
_FEWEST_CHARACTERS = 16
_CURE = f"give every rank the same {SECRET_VARIABLE}, or none any"


class Authenticator:
    """Signs what a rank sends, and verifies of what it gets that a rank of this run sent it at this place.

    Args:
        secret: What the ranks share and nobody else knows; None leaves messages unsigned.
        session: What distinguishes this run's messages from those of any other under the same secret.
    """

    def __init__(self, secret: bytes | None = None, session: bytes = b"") -> None:
        self._secret = secret
        self._session = session

    @property
    def signs(self) -> bool:
        """Whether there is a secret."""
        return self._secret is not None

    def sign(self, message: bytes, context: str) -> bytes:
        """Return a message as it travels.

        Args:
            message: The message.
            context: Who sends it, and as which message of which exchange; no two messages have the same.
        """
        if self._secret is None:
            return _UNSIGNED + message
        return _SIGNED + self._code(self._secret, message, context) + message

    def verify(self, signed: bytes | memoryview, context: str) -> memoryview:
        """Return the message in what has arrived.

        Args:
            signed: What ``sign`` returned on another rank, or anything else.
            context: What it was called with there.

        Raises:
            CollectiveError: If no rank of this run has sent this here.
        """
        view = memoryview(signed)
        kind, rest = bytes(view[:1]), view[1:]
        if self._secret is None:
            if kind != _UNSIGNED:
                raise CollectiveError(f"a message ({context}) is signed, but this rank has no secret; {_CURE}.")
            return rest
        code, message = rest[:_CODE_BYTES], rest[_CODE_BYTES:]
        if kind != _SIGNED or not hmac.compare_digest(code, self._code(self._secret, message, context)):
            raise CollectiveError(
                f"a message ({context}) was refused unread: no rank of this run has signed it; somebody else writes to "
                f"the ranks' store or their connections (SECURITY.md says who can), or the ranks differ: {_CURE}."
            )
        return message

    def _code(self, secret: bytes, message: bytes | memoryview, context: str) -> bytes:
        code = hmac.new(secret, self._session.ljust(_CODE_BYTES, b"\0"), "sha256")
        code.update(len(context).to_bytes(8, "little") + context.encode())
        code.update(message)
        return code.digest()


def read_secret() -> bytes | None:
    """Return the secret that this process was started with, if it was.

    Raises:
        CollectiveError: If it is too short to be one.
    """
    text = os.environ.get(SECRET_VARIABLE)
    if text is None:
        return None
    if len(text) < _FEWEST_CHARACTERS:
        raise CollectiveError(
            f"{SECRET_VARIABLE} has {len(text)} characters, too few for a secret; give at least {_FEWEST_CHARACTERS} "
            "random ones, such as `openssl rand -hex 32` prints, or unset it."
        )
    return text.encode()


def agree_on_session(
    store: dist.Store, rank: int, world_size: int, secret: bytes | None, roll_call: RollCall
) -> Authenticator:
    """Agree with all ranks on a session, and check that all have the same secret; every rank calls this.

    Each rank draws a number, and the session is made of all of them: no message of another run fits into it.

    Args:
        store: Keys for this meeting alone.
        rank: This process's place.
        world_size: How many ranks there are.
        secret: This rank's.
        roll_call: Where ranks wait for one another.

    Returns:
        What signs and verifies this session's messages.

    Raises:
        CollectiveError: If the ranks' secrets differ, or some have none.
        MissingRank: If a rank does not come.
    """
    if world_size == 1:
        return Authenticator(secret)
    hello, mine = Authenticator(secret), secrets.token_bytes(_CODE_BYTES)
    _put(store, f"hello/{rank}", hello.sign(mine, f"hello of rank {rank} of {world_size}"))
    roll_call.answer("the start")
    if rank == 0:
        _put(store, "session", hello.sign(serialize(_numbers(store, hello, world_size)), "session"))
    signed = store.get("session")
    roll_call.answer("the session's start")  # who raises below may serve the store, and others have read it by now
    numbers = deserialize(hello.verify(signed, "session"))
    if isinstance(numbers, str):
        raise CollectiveError(numbers)
    if not isinstance(numbers, list) or len(numbers) != world_size or numbers[rank] != mine:
        raise CollectiveError(
            f"rank {rank} was given a session that it has no part in; somebody else writes to the store that the ranks "
            "meet at, SECURITY.md says who can."
        )
    if rank == 0 and secret is None:
        # Within one host torchrun never signs; over a network it is worth a warning.
        log.log(
            logging.INFO if _is_local(os.environ.get("MASTER_ADDR", "")) else logging.WARNING,
            "messages between ranks are not signed; set %s to the same random text on every rank (SECURITY.md).",
            SECRET_VARIABLE,
        )
    return Authenticator(secret, hashlib.sha256(serialize(numbers)).digest())


def _numbers(store: dist.Store, hello: Authenticator, world_size: int) -> list[bytes] | str:
    """Collect what all ranks have drawn, or return a sentence that names those without the same secret."""
    numbers, strangers = [], []
    for rank in range(world_size):
        try:
            signed = hello.verify(store.get(f"hello/{rank}"), f"hello of rank {rank} of {world_size}")
            numbers.append(bytes(signed))
        except CollectiveError:
            strangers.append(f"rank {rank}")
    if not strangers:
        return numbers
    return f"{SECRET_VARIABLE} is not on {', '.join(strangers)} what it is on rank 0; {_CURE}."


def _is_local(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in ("", "localhost")


def _put(store: dist.Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # torch's stubs leave bytes out
