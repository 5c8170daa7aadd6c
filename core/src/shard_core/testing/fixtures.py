"""The kit's pytest plugin, loaded by itself where shard-core is installed: ranks to test on, and the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shard_core.testing.processes.early_scripts import EarlyScripts
from shard_core.testing.processes.worlds import Worlds
from shard_core.testing.rules import RuleBroken, check_untouched, promise_of, promises_of
from shard_core.testing.selected_promises import Chosen, chosen_by_class

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from shard_core.testing.conformance import Conformance
    from shard_core.testing.rules import Promise

#: By class: what is broken or stands on something broken, and which broken promise that is.
_BROKEN = pytest.StashKey[dict[type, dict[str, str]]]()
_CHOSEN = pytest.StashKey["dict[type[Conformance], Chosen]"]()
_UNJUDGED = pytest.StashKey[bool]()
_SILENCERS = ("skip", "skipif", "xfail", "usefixtures")


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Return a callable from a size to its world: ``worlds(2).run(function, *args)``."""
    session = Worlds()
    yield session
    session.close()


@pytest.fixture(scope="session")
def early_scripts() -> Iterator[EarlyScripts]:
    """Yield the scripts that run beside what is judged; those that nobody waits for end with the session."""
    session = EarlyScripts()
    yield session
    session.close()


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> Chosen:
    """Return what of this conformance class will be judged."""
    return request.config.stash[_CHOSEN][request.cls]


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Check that authors keep the rules, and expect the failures they gave reasons for."""
    session.stash[_BROKEN] = {}
    for item in items:
        promise = promise_of(getattr(item, "obj", None))
        if promise is None:
            continue
        cls = _author(item)
        silenced = [mark.name for mark in item.iter_markers() if mark.name in _SILENCERS]
        if silenced:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {silenced[0]!r}; a promise can only be excused in known_failures."
            )
        if promise.name in cls.known_failures:
            item.add_marker(pytest.mark.xfail(strict=True, reason=cls.known_failures[promise.name]))
    if items:
        _check_untouched(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record what will be judged, after everybody has left out what they wish."""
    session.config.stash[_CHOSEN] = chosen_by_class(session.items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report how much of the kit was selected: what was left out somewhere is not seen otherwise."""
    for cls, chosen in config.stash.get(_CHOSEN, {}).items():
        sizes = " and ".join(map(str, cls.world_sizes))
        terminalreporter.write_line(
            f"{cls.__name__}: {len(chosen.names)} of {len(promises_of(cls))} promises, at world sizes {sizes}, "
            f"{len(cls.known_failures)} known failures."
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what stands on a broken promise: its failure would be no news."""
    promise = promise_of(getattr(item, "obj", None))
    if promise is None:
        return
    broken = item.session.stash[_BROKEN].setdefault(_author(item), {})
    below = [name for name in promise.after if name in broken]
    if below:
        broken.setdefault(promise.name, broken[below[0]])
        item.stash[_UNJUDGED] = True
        pytest.skip(f"not judged: it stands on {broken[below[0]]!r}, which is broken")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record broken promises, and add what was promised to the report of what went wrong."""
    report = yield
    promise = promise_of(getattr(item, "obj", None))
    if promise is not None and report.skipped and _is_silenced(item, promise):
        report.outcome = "failed"
        report.longrepr = f"{report.longreprtext}\nThis is no verdict; a promise can only be excused in known_failures."
    if promise is not None and report.failed:
        item.session.stash[_BROKEN].setdefault(_author(item), {})[promise.name] = promise.name
        report.sections.append(("Promise", f"{promise.sentence}\nUsual cause: {promise.cause}"))
    return report


def _is_silenced(item: pytest.Item, promise: Promise) -> bool:
    """Return whether somebody else's fixture or hook has skipped a promise."""
    return not item.stash.get(_UNJUDGED, False) and promise.name not in _author(item).known_failures


def _check_untouched(items: list[pytest.Item]) -> None:
    from shard_core.testing.conformance import Conformance

    classes = dict.fromkeys(_author(item) for item in items if promise_of(getattr(item, "obj", None)))
    for cls in classes:
        try:
            check_untouched(cls, Conformance)
        except RuleBroken as error:
            raise pytest.UsageError(str(error)) from error


def _author(item: pytest.Item) -> type[Conformance]:
    cls: type[Conformance] = item.cls  # type: ignore[attr-defined]
    return cls
