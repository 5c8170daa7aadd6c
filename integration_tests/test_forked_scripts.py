"""Scripts of forks: how they end is known, however soon they do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_scripts import ForkedScripts


class Late(ForkedScripts):
    """Reads answers late, as on a busy machine."""

    def _answer(self) -> str:
        time.sleep(1)
        return super()._answer()


@pytest.fixture(scope="module")
def late() -> Iterator[Late]:
    scripts = Late()
    yield scripts
    scripts.close()


@pytest.mark.parametrize(
    ("text", "code", "printed"),
    [("print('done')", 0, "done\n"), ("raise SystemExit(3)", 3, ""), ("while True: pass", None, "")],
)
def test_ends_are_known_however_soon(late, tmp_path: Path, text: str, code: int | None, printed: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    ended = late.run(script, os.environ, seconds=3)
    assert (ended.code, ended.printed) == (code, printed)
