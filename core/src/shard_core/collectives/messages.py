"""One rank's messages to the others: a value, an object of a user's, or why there is none."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from shard_core.collectives.serialization import Unserializable, deserialize, serialize
from shard_core.errors import CollectiveError

if TYPE_CHECKING:
    import torch

_VALUE, _PICKLE, _REFUSAL = b"v", b"p", b"r"


def pack(value: Any) -> bytes:
    """Convert a value of Shard's own to a message; one that cannot be sent becomes a refusal."""
    try:
        return _VALUE + serialize(value)
    except Unserializable as error:
        return _REFUSAL + str(error).encode()


def unpack(message: memoryview, device: torch.device | None = None) -> Any:
    """Return what ``pack`` was given on another rank; nothing is executed.

    Args:
        message: The message.
        device: Where tensors go that were on a device.

    Raises:
        CollectiveError: If it could not be sent, or this is no such message.
    """
    raise_refusal(message)
    if bytes(message[:1]) != _VALUE:
        raise CollectiveError("a message holds something else than the values that ranks send; it was not read.")
    return deserialize(message[1:], device)


def raise_refusal(message: bytes | memoryview) -> None:
    """Raise the error in a refusal; return for any other message.

    Raises:
        CollectiveError: If it is a refusal.
    """
    if bytes(message[:1]) == _REFUSAL:
        raise CollectiveError(bytes(message[1:]).decode(errors="replace"))


def pack_object(value: Any) -> bytes:
    """Convert an object of a user's to a message: pickled only if it does not consist of plain values alone."""
    try:
        return _VALUE + serialize(value, exact=True)
    except Unserializable:
        pass
    try:
        return _PICKLE + pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - pickling runs the object's own code; every rank raises this
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        reason = str(error).partition("\n")[0].rstrip(".")
        return _REFUSAL + f"an object of type {kind} cannot be sent to other ranks: {reason}.".encode()


def unpack_object(message: memoryview, device: torch.device | None = None) -> Any:
    """Return what ``pack_object`` was given on another rank; a pickle is executed, so only ranks may send it.

    Args:
        message: The message, which has been verified where there is a secret.
        device: Where tensors go that were on a device.

    Raises:
        CollectiveError: If it could not be sent, or this is no such message.
    """
    if bytes(message[:1]) == _PICKLE:
        return pickle.loads(message[1:])
    return unpack(message, device)
