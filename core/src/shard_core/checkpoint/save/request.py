"""What each rank was asked to save, which the ranks compare where they first meet."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from shard_core.checkpoint.all_ranks import check_same_path
from shard_core.errors import CheckpointError, InvalidOption, nearest

_FORMS = ("sharded", "full")

#: What ranks send of a request: the path, the form, and whether the save is asynchronous.
RequestSummary = tuple[str, str, bool]


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed, which is no matter to a path that begins elsewhere
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What one rank was asked to save.

    Attributes:
        path: Where the checkpoint will be.
        state_dict_type: Its form, as the user gave it; None for ``"sharded"``.
        is_async: Whether it is written while training goes on.
        start: The folder that a relative path begins in: when it is written this process may be in another.
    """

    path: str | os.PathLike[str]
    state_dict_type: str | None = None
    is_async: bool = False
    start: str = dataclasses.field(default_factory=_here)

    def summary(self) -> RequestSummary:
        """Return what the other ranks compare.

        Raises:
            InvalidOption: If there is no such form.

        Example:
            >>> SaveRequest(path="run/step-1").summary()
            ('run/step-1', 'sharded', False)
        """
        return os.fspath(self.path), self.form, self.is_async

    @property
    def form(self) -> str:
        """The form's name; raises ``InvalidOption`` if there is no such form."""
        form = "sharded" if self.state_dict_type is None else self.state_dict_type
        if not isinstance(form, str):
            raise InvalidOption(
                f"state_dict_type is {form!r}, of type {type(form).__name__}; it must be one of: {', '.join(_FORMS)}."
            )
        if form not in _FORMS:
            raise InvalidOption(
                f"state_dict_type {form!r} is none of: {', '.join(_FORMS)}{nearest(form, _FORMS) or '.'}"
            )
        return form


def check_same_request(summaries: Sequence[RequestSummary]) -> None:
    """Check that all ranks save one checkpoint, in one form, and all of them asynchronously or none.

    Args:
        summaries: What each rank was asked to save, in rank order.

    Raises:
        CheckpointError: Naming a rank that was asked for something else than rank 0.
    """
    for rank, (_, form, is_async) in enumerate(summaries):
        if form != summaries[0][1]:
            raise CheckpointError(
                f"rank {rank} was given state_dict_type {form!r}, rank 0 {summaries[0][1]!r}; give all ranks the same."
            )
        if is_async != summaries[0][2]:
            raise CheckpointError(
                f"rank {rank} saves with blocking={not is_async}, rank 0 with blocking={not summaries[0][2]}; give all "
                "ranks the same."
            )
    check_same_path([path for path, _, _ in summaries])
