"""The tutorial 'Write a backend' is true: followed step by step, the kit says what the page quotes."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from environments import ROOT, Environment, build_wheel
from pages import page

PAGE = page("docs/tutorials/write-a-backend.md")
PROMPT = "$ python3 noxfile.py -s "
ENGINE = "src/shard_mirror/strategy.py"
#: Where each session looks, as in the noxfile.
PLACES = {
    "conformance(shard-mirror)": ("tests/test_conformance.py",),
    "tests(shard-mirror)": ("src", "tests", "--ignore=tests/test_conformance.py", "--doctest-modules"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One command of the page, the engine as it is by then, and what the page quotes of the answer."""

    engine: str
    session: str
    chosen: list[str]
    quoted: str


def steps() -> list[Step]:
    """Parse the steps of the page; the kit as a whole is test_template.py's business."""
    found, engine, command = [], "", None
    for block in PAGE.blocks("python", "diff", "console", "text"):
        if block.language == "python" and block.file == ENGINE:
            engine = block.text.removeprefix(f"# {ENGINE}\n")
        elif block.language == "diff":
            engine = patched(engine, block.text)
        elif block.language == "console":
            session, *more = shlex.split(block.text.splitlines()[0].removeprefix(PROMPT))
            command = (session, more[1:]) if session in PLACES else None
        elif block.language == "text" and command:
            found.append(Step(engine=engine, session=command[0], chosen=command[1], quoted=block.text))
    return found


def patched(text: str, diff: str) -> str:
    """Apply a diff whose pieces are parted by lines of ``@@`` and found by what they say."""
    for piece in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = piece.splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != out) for out in "+-")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def missing(quoted: str, output: str) -> list[str]:
    """List the lines that were not printed; ``...`` stands for anything."""
    patterns = {line: ".*".join(re.escape(part.strip()) for part in line.split("...")) for line in quoted.splitlines()}
    return [line for line, pattern in patterns.items() if not re.search(pattern, output)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Environment, Path]:
    """Run the page's first command outside of this repository, and install what comes of it."""
    home = tmp_path_factory.mktemp("tutorial")
    project = runpy.run_path(str(ROOT / "packages" / "new_backend.py"))["make"]("mirror", home)
    environment = Environment(home / "environment")
    environment.install(build_wheel(project, home / "wheels"))
    return environment, project


def first(found: list[Step]) -> list[Any]:
    """Leave all steps but the first to the long run: each takes a session of its own."""
    later = found[1:]
    return [
        pytest.param(step, id=" ".join([step.session, *step.chosen]), marks=[pytest.mark.long] if step in later else [])
        for step in found
    ]


@pytest.mark.parametrize("step", first(steps()))
def test_the_kit_says_what_the_page_quotes(made, tmp_path, step):
    environment, project = made
    here = shutil.copytree(project, tmp_path / "step")
    (here / ENGINE).write_text(step.engine)
    arguments = ("-m", "pytest", "-p", "no:cacheprovider", *PLACES[step.session], *step.chosen)
    output = environment.python(*arguments, folder=here, sources=here / "src").stdout
    assert missing(step.quoted, output) == [], output


def test_what_the_page_shows_is_what_is_made(made):
    environment, project = made
    assert steps()[-1].engine == (project / ENGINE).read_text()
    (entry,) = PAGE.blocks("toml")
    assert entry.text in (project / "pyproject.toml").read_text()
    files = [row[0] for row in PAGE.table("file", "what it is")]
    assert [name for name in files if not (project / name).exists()] == []
    kept, excused = (block for block in PAGE.blocks("python") if block.file != ENGINE)
    assert kept.text == f"# {kept.file}\n" + (project / kept.file).read_text()
    (project / "excused.py").write_text(f"from shard_core.testing import Conformance\n\n{excused.text}")
    assert environment.python("excused.py", folder=project).stderr == ""
