"""What a promise of the kit is, and what keeps a strategy's author from weakening one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from shard_core.errors import nearest

if TYPE_CHECKING:
    from shard_core.capability import Capability

TestFunction = TypeVar("TestFunction", bound=Callable[..., None])

#: What the author of a test file may set about a strategy; ``strategy`` must be set.
SETTINGS = ("strategy", "options", "world_sizes", "device", "environment", "patience", "known_failures")

#: What Python itself writes into a class; anything else between underscores would change how the kit runs.
_PYTHONS = frozenset(
    f"__{name}__"
    for name in (
        *("annotate_func", "annotations", "annotations_cache", "classdictcell", "dict", "doc", "firstlineno"),
        *("module", "orig_bases", "parameters", "qualname", "static_attributes", "weakref"),
    )
)

_CAUSE = "Usual cause:"
_SUITES = "shard_core.testing.suites."


class RuleBroken(TypeError):
    """A conformance test was removed, replaced or silenced; only ``known_failures`` may excuse one."""


class CapabilityRefused(Exception):
    """Every rank answered a call with ``MissingCapability``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
    """One thing every strategy does alike, and the test that holds it to it.

    Attributes:
        noun: What it is about: the suite it stands in.
        name: Its test's name without ``test_``.
        sentence: What is promised.
        cause: What usually went wrong when it is broken.
        needs: The capability it belongs to: undeclared, the call must raise ``MissingCapability`` instead.
        after: The promises it stands on; while one of them is broken, this one is not judged.
        every_size: Whether it is judged at every world size rather than at one.
    """

    noun: str
    name: str
    sentence: str
    cause: str
    needs: Capability | None
    after: tuple[str, ...]
    every_size: bool


def promise(
    *, needs: Capability | None = None, after: tuple[str, ...] = (), every_size: bool = True
) -> Callable[[TestFunction], TestFunction]:
    """Mark a suite's test as a promise; its docstring is the sentence, then a section ``Usual cause:``.

    Args:
        needs: The capability it belongs to.
        after: Names of the promises it stands on.
        every_size: Whether it is judged at every world size.

    Returns:
        The decorator.
    """

    def decorate(test: TestFunction) -> TestFunction:
        sentence, _, cause = inspect.cleandoc(test.__doc__ or "").partition(_CAUSE)
        made = Promise(
            noun=test.__module__.removeprefix(_SUITES).split(".")[0],
            name=test.__name__.removeprefix("test_"),
            sentence=" ".join(sentence.split()),
            cause=" ".join(cause.split()),
            needs=needs,
            after=after,
            every_size=every_size,
        )

        @functools.wraps(test)
        def held(self: Any, *args: Any, **kwargs: Any) -> None:
            offered = needs is None or needs in self.info.capabilities
            try:
                test(self, *args, **kwargs)
            except CapabilityRefused as refusal:
                if offered:
                    raise AssertionError(f"the strategy refused what it should do: {refusal}") from refusal
            else:
                if not offered:
                    assert needs is not None
                    raise AssertionError(
                        f"{needs.name} is not declared, so the call must raise MissingCapability, and it did not; "
                        f"declare the capability or refuse the call."
                    )

        held.promise = made  # type: ignore[attr-defined]
        return held  # type: ignore[return-value]

    return decorate


def promise_of(test: object) -> Promise | None:
    """Return the promise that a test function or method holds, or ``None`` for an ordinary test."""
    found = getattr(test, "promise", None)
    return found if isinstance(found, Promise) else None


def promises_of(suite: type) -> dict[str, Promise]:
    """List the promises of a suite, by name."""
    found = (promise_of(getattr(suite, name)) for name in dir(suite) if name.startswith("test_"))
    return {each.name: each for each in found if each is not None}


def check_author(cls: type, kit: type) -> None:
    """Refuse a test class that says more than an author may.

    Args:
        cls: The author's class.
        kit: The class it inherits its tests from.

    Raises:
        RuleBroken: If it, or a class it inherits beside the kit, replaces or removes anything, or if it excuses a
            promise without a reason.
    """
    theirs = [each for each in cls.__mro__ if each not in kit.__mro__]
    for name in dict.fromkeys(name for each in theirs for name in vars(each) if name not in _PYTHONS):
        if name not in SETTINGS:
            raise RuleBroken(
                f"{cls.__name__} sets {name!r}{nearest(name, SETTINGS)}; a conformance class may set "
                f"{', '.join(SETTINGS)} and nothing else: tests of your own go into another class, and a promise "
                "that cannot be kept yet is listed in known_failures with its reason."
            )
    if not cls.__name__.startswith("Test"):
        raise RuleBroken(f"pytest does not look into a class named {cls.__name__}; call it Test{cls.__name__}.")
    if not isinstance(getattr(cls, "strategy", None), str):
        raise RuleBroken(f"{cls.__name__} names no strategy; set strategy = 'NAME' as `shard list` shows it.")
    sizes = getattr(cls, "world_sizes", ())
    if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise RuleBroken(f"{cls.__name__}.world_sizes is {sizes!r}; give numbers of ranks from 1 up, such as (1, 2).")
    _check_known_failures(cls, promises_of(kit))


def check_untouched(cls: type, kit: type) -> None:
    """Refuse a test class whose tests were exchanged after it was made.

    Args:
        cls: The author's class.
        kit: The class it inherits its tests from.

    Raises:
        RuleBroken: If a test is not the kit's.
    """
    for name in promises_of(kit):
        test = f"test_{name}"
        if getattr(cls, test, None) is not getattr(kit, test):
            raise RuleBroken(f"{cls.__name__}.{test} is not the kit's; list it in known_failures with a reason.")


def _check_known_failures(cls: Any, promises: Mapping[str, Promise]) -> None:
    if not isinstance(cls.known_failures, Mapping):
        raise RuleBroken(
            f"{cls.__name__}.known_failures is {cls.known_failures!r}; give a dict of promises to reasons."
        )
    for name, reason in cls.known_failures.items():
        if name not in promises:
            raise RuleBroken(f"{cls.__name__} excuses {name!r}, which is no promise{nearest(name, promises) or '.'}")
        if not isinstance(reason, str) or not reason.strip():
            raise RuleBroken(f"{cls.__name__} excuses {name!r} without a reason; say why it fails.")
