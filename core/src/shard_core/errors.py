"""Every exception of the project; each message is one sentence: what was wrong, what is right, and the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShardError(Exception):
    """Catch this to catch whatever Shard raises on purpose."""


class UnknownStrategy(ShardError, LookupError):
    """No installed distribution offers a strategy of this name."""


class AmbiguousStrategy(ShardError, LookupError):
    """Two installed distributions claim the same name."""


class IncompatibleBackend(ShardError, ImportError):
    """A backend asks for another version of ``shard-core`` than the one installed."""


class StrategyUnavailable(ShardError, ImportError):
    """A backend is installed but cannot run here: a library, a version or a device is missing."""


class BrokenBackend(ShardError, ImportError):
    """A backend's plugin or factory fails to import or does not keep the plugin contract."""


class MissingCapability(ShardError, NotImplementedError):
    """The strategy does not offer what was asked of it."""


class InvalidOption(ShardError, ValueError):
    """An argument has a name, a type or a value that is not allowed."""


class UnsupportedPrecision(ShardError, ValueError):
    """The precision is unknown, or the strategy cannot honour it."""


class UnsupportedFloat16(MissingCapability, UnsupportedPrecision):
    """The precision computes in float16, and the strategy does not promise ``FP16``; may be caught as either."""


class PrecisionMismatch(ShardError, TypeError):
    """After setup a tensor has another dtype than in the precision's table."""


class SetupError(ShardError, RuntimeError):
    """A module or an optimizer cannot be set up, or is used before it was."""


class NonFiniteGradient(ShardError, FloatingPointError):
    """The global gradient norm is infinite or not a number, on every rank alike."""


class CollectiveError(ShardError, RuntimeError):
    """A collective cannot work as it was called, or has failed between ranks."""


class MissingRank(CollectiveError, TimeoutError):
    """Some ranks did not arrive where the others wait; the message names them."""


class LaunchError(ShardError, RuntimeError):
    """Ranks could not be started, or the function given to ``launch`` cannot be pickled for them."""


class RankFailed(LaunchError):
    """A rank raised or died; the message carries its own traceback.

    Args:
        message: Which rank, what of, and from where.
        sentence: The message of the rank's own error, where Shard raised it on purpose; it needs no traceback.

    Example:
        >>> RankFailed("rank 1 of 2 failed: ...", "devices is 0; ...").sentence
        'devices is 0; ...'
    """

    def __init__(self, message: str, sentence: str | None = None) -> None:
        super().__init__(message)
        self.sentence = sentence


class CheckpointError(ShardError, RuntimeError):
    """A checkpoint cannot be written or read."""


class StorageError(CheckpointError, OSError):
    """A store did not do what it was asked, or cannot be reached."""


class CheckpointOvertaken(CheckpointError):
    """Another save was committed to the same path since this one began; that one stands."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """The path holds no committed checkpoint."""


class CheckpointCorrupted(CheckpointError):
    """The bytes on disk are not those that were committed; the message names the tensors."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint and the objects to restore differ; the message lists every difference."""


class CannotReplay(ShardError, RuntimeError):
    """A constructor did something that recording cannot follow; the message names the operation."""


#: So many letters of a word say which is meant, if just one begins so.
_BEGINS = 4


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Suggest the closest allowed word, ready to be put into a message.

    Args:
        word: What the user typed.
        allowed: What would have been right.

    Returns:
        ``"; did you mean 'fsdp'?"``, or an empty string when nothing is close.

    Example:
        >>> nearest("FSDPP", ["ddp", "fsdp", "single"])
        "; did you mean 'fsdp'?"
        >>> nearest("reshard", ["reshard_after_forward"])
        "; did you mean 'reshard_after_forward'?"
        >>> nearest("zzz", ["ddp"])
        ''
    """
    by_lower = {name.lower(): name for name in allowed}
    begun = [name for name in by_lower if len(word) >= _BEGINS and name.startswith(word.lower())]
    close = difflib.get_close_matches(word.lower(), by_lower, n=1) or (begun if len(begun) == 1 else [])
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
