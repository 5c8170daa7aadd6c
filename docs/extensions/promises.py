"""Writes the reference of promises from the suites themselves, so that the page says what is tested."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from shard_core.testing import Conformance, Promise, promise_of

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGE = "reference/promises"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", append)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def append(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append the promises to what is written by hand."""
    if page == PAGE:
        source[0] = "\n".join([source[0], *text()])


def text() -> Iterator[str]:
    """Write the promises in the order in which they are judged, under their nouns and suites."""
    noun = ""
    for suite in reversed(Conformance.__bases__):
        tests = [test for name, test in vars(suite).items() if name.startswith("test_")]
        if (of := promise_of(tests[0])) and of.noun != noun:
            noun = of.noun
            yield f"## {noun.capitalize()}\n"
        yield f"### {suite.__name__}\n\n{escaped(inspect.getdoc(suite) or '')}\n"
        for test in tests:
            if promise := promise_of(test):
                yield from entry(promise, places(promise, test))


def entry(promise: Promise, judged: str) -> Iterator[str]:
    """Write one promise."""
    yield f"({target(promise.name)})=\n#### `{promise.name}`\n\n{escaped(promise.sentence)}\n"
    yield f"*Usual cause:* {escaped(promise.cause)}\n"
    if promise.needs is not None:
        yield f"*Needs* [`{promise.needs.name}`](capabilities.md); undeclared, the call must be refused.\n"
    if promise.after:
        yield f"*Stands on* {', '.join(f'[`{name}`](#{target(name)})' for name in promise.after)}.\n"
    yield f"*Judged* {judged}.\n"


def places(promise: Promise, test: Callable[..., None]) -> str:
    """Return on how many ranks a promise is judged."""
    if not {"ranks", "ranks_of"} & set(inspect.signature(test).parameters):
        return "without ranks"
    return "at every world size" if promise.every_size else "at one world size: two ranks, if it can"


def escaped(text: str) -> str:
    """Escape what Markdown would read into a sentence besides its code."""
    pieces = re.split(r"(`+[^`]*`+)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([_*<\[])", r"\\\1", piece) for piece in pieces)


def target(name: str) -> str:
    """Return the anchor on the page that a promise's name links to."""
    return f"promise-{name.replace('_', '-')}"
