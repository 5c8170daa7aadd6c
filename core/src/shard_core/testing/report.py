"""From the outcomes of the kit's tests to promises kept and broken."""

from __future__ import annotations

import dataclasses
import enum
import re
import textwrap
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shard_core.errors import RankFailed
from shard_core.testing.rules import promise_of

if TYPE_CHECKING:
    from shard_core.capability import Capability
    from shard_core.testing.rules import Promise

_LONGEST_REASON = 400
_HANGS = re.compile(r"; it hangs here:$")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_INTERRUPTED = "the run ended before it was its turn"


class Status(enum.Enum):
    """What became of a promise; the value is the word users read."""

    KEPT = "kept"
    BROKEN = "broken"
    REFUSED = "refused"
    NOT_JUDGED = "not judged"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one promise over all its cases.

    Attributes:
        promise: The promise.
        status: What became of it; refused means that the capability it needs is not declared and the call
            says so, as it must.
        reason: Why it was not kept, from the first case that shows it; else empty.
        detail: The whole report of that case, for a broken promise.
    """

    promise: Promise
    status: Status
    reason: str = ""
    detail: str = ""

    @property
    def name(self) -> str:
        """Return the promise's noun and name, such as ``training.averages_gradients``."""
        return f"{self.promise.noun}.{self.promise.name}"


class Reporter:
    """A pytest plugin that keeps score of promises.

    Args:
        declared: The capabilities the strategy declares.
        chosen: Names of the promises to judge; empty for all.
        on_case: Called before each case with the promise's name, how many cases are done, and of how many.
    """

    def __init__(
        self, declared: Collection[Capability], chosen: Collection[str], on_case: Callable[[str, int, int], None]
    ) -> None:
        self._declared = declared
        self._chosen = chosen
        self._on_case = on_case
        self._promises: dict[str, Promise] = {}
        self._outcomes: dict[str, list[_Outcome]] = {}
        self._done = 0
        self._errors: list[str] = []

    @property
    def errors(self) -> list[str]:
        """Return why the tests could not be made; empty if they could."""
        return self._errors

    def verdicts(self) -> list[Verdict]:
        """Return what became of each promise, in the order they were judged."""
        by_name = {promise.name: promise for promise in self._promises.values()}
        cases = {name: [id for id, each in self._promises.items() if each.name == name] for name in by_name}
        return [
            _judge(promise, [self._outcomes.get(case, []) for case in cases[name]], self._declared)
            for name, promise in by_name.items()
        ]

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the promises nobody asked for."""
        kept: list[pytest.Item] = []
        left: list[pytest.Item] = []
        for item in items:
            promise = promise_of(getattr(item, "obj", None))
            wanted = promise is not None and (not self._chosen or promise.name in self._chosen)
            (kept if wanted else left).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=left)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record which cases there will be."""
        for item in session.items:
            promise = promise_of(getattr(item, "obj", None))
            assert promise is not None
            self._promises[item.nodeid] = promise

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record why the tests themselves could not be made."""
        if report.failed:
            self._errors.append(report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report what comes next."""
        self._on_case(self._promises[nodeid].name, self._done, len(self._promises))

    def pytest_runtest_logfinish(self) -> None:
        """Count the case."""
        self._done += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record how a case went, with the reason while the exception is at hand."""
        report = yield
        if report.when == "call" or not report.passed:
            error = call.excinfo.value if call.excinfo else None
            self._outcomes.setdefault(item.nodeid, []).append(
                _Outcome(
                    case=item.nodeid.partition("[")[2].removesuffix("]"),
                    outcome=report.outcome,
                    reason=reason_of(error) if error is not None else "",
                    detail=report.longreprtext if report.failed else "",
                )
            )
        return report


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Outcome:
    case: str
    outcome: str
    reason: str
    detail: str


def reason_of(error: BaseException) -> str:
    """Format an exception as one line: of ranks that failed, what the first of them raised.

    Args:
        error: What a test ended with.

    Returns:
        The line.

    Example:
        >>> reason_of(AssertionError("the norm is 2.0 on rank 1"))
        'the norm is 2.0 on rank 1'
        >>> reason_of(ZeroDivisionError("division by zero"))
        'ZeroDivisionError: division by zero'
    """
    text = str(error)
    if isinstance(error, RankFailed):
        text = _first_rank(text)
    elif not isinstance(error, AssertionError | pytest.skip.Exception):
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text or "an assertion without a message failed", _LONGEST_REASON, placeholder=" ...")


def _first_rank(report: str) -> str:
    """Find the first rank in the report of a world, and the exception its traceback ends with.

    Of ranks that hang each is reported with its place: all but one of them may only wait for that one.
    """
    parts = re.split(r"\n\n(?=rank \d+ )", report)
    first = parts[min(1, len(parts) - 1)]
    if _HANGS.search(first.partition("\n")[0]):
        return "; ".join(_place(part) for part in parts[1:])
    head, *lines = first.partition("\nIt printed:\n")[0].splitlines()
    if not head.endswith("raised:"):
        return head
    outside = [bool(line) and not line.startswith(" ") for line in lines]
    # An exception follows the frames of its traceback, if it has any; chained ones come first.
    ends = [number for number in range(1, len(lines)) if outside[number] and not outside[number - 1]]
    return f"{head} {' '.join(lines[ends[-1] :] if ends else lines)}"


def _place(part: str) -> str:
    """Return which call of its own a hanging rank is in, innermost of those that are no library's."""
    head, *stack = part.splitlines()
    frames = [match for match in map(_FRAME.search, stack) if match]
    own = [match for match in frames if "/torch/" not in match["file"] and "/threading.py" not in match["file"]]
    named = [f"{Path(match['file']).name}, line {match['line']}, in {match['function']}" for match in own or frames]
    return _HANGS.sub("", head) + (f", in {named[0]}" if named else "")


def _judge(promise: Promise, cases: list[list[_Outcome]], declared: Collection[Capability]) -> Verdict:
    outcomes = [outcome for case in cases for outcome in case]
    failed = [each for each in outcomes if each.outcome == "failed"]
    skipped = [each for each in outcomes if each.outcome == "skipped"]
    if failed:
        first = failed[0]
        reason = f"{first.case}: {first.reason}" if first.case else first.reason
        return Verdict(promise=promise, status=Status.BROKEN, reason=reason, detail=first.detail)
    if not all(cases):
        return Verdict(promise=promise, status=Status.NOT_JUDGED, reason=_INTERRUPTED)
    if len(skipped) == len(outcomes):
        return Verdict(promise=promise, status=Status.NOT_JUDGED, reason=skipped[0].reason.removeprefix("not judged: "))
    if promise.needs is not None and promise.needs not in declared:
        return Verdict(promise=promise, status=Status.REFUSED, reason=f"{promise.needs.name} is not declared")
    return Verdict(promise=promise, status=Status.KEPT, reason=skipped[0].reason if skipped else "")
