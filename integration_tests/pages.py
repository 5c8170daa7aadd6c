"""The project's pages as files of text with code in them."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHELL = ("bash", "console")
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^# (\S+\.(?:py|toml))\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page.

    Attributes:
        language: What stands after the fence.
        text: What stands inside.
    """

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """Return the file it is meant to be, if its first line is a comment that names one."""
        match = _FILE.match(self.text)
        return match[1] if match else None

    @property
    def starts(self) -> bool:
        """Return whether it is a script that starts something when it is run."""
        return 'if __name__ == "__main__":' in self.text


@dataclasses.dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        path: Where it is.
    """

    path: Path

    @property
    def name(self) -> str:
        """Return its path in the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        """Return all of it."""
        return self.path.read_text()

    def blocks(self, *languages: str) -> list[Block]:
        """List its fenced blocks of some languages, in order."""
        found = [Block(language=match[1], text=match[2]) for match in _FENCE.finditer(self.text)]
        return [block for block in found if block.language in languages]

    def commands(self) -> list[list[str]]:
        """List the commands of its shell blocks as words, without settings of variables in front."""
        commands = []
        for block in self.blocks(*SHELL):
            lines = block.text.replace("\\\n", " ").splitlines()
            typed = [line[2:] for line in lines if line.startswith("$ ")] if block.language == "console" else lines
            commands += [words for line in typed if (words := _words(line))]
        return commands

    def table(self, *header: str) -> list[list[str]]:
        """Return the rows of all tables with this header, cells without backticks; none if there is no such table."""
        lines = self.text.splitlines()
        starts = [place for place, line in enumerate(lines) if _cells(line) == list(header)]
        tables = [itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :]) for start in starts]
        return [_cells(line) for rows in tables for line in rows]


def pages() -> list[Page]:
    """List all pages: those of the documentation, the repository's own and the packages' front pages."""
    documentation = [file for file in (ROOT / "docs").rglob("*.md") if "_build" not in file.parts]
    front = [*ROOT.glob("*.md"), ROOT / "core" / "README.md", *ROOT.glob("packages/*/README.md")]
    return [Page(path) for path in sorted([*documentation, *front])]


def page(name: str) -> Page:
    """Return the page at a path in the repository."""
    return Page(ROOT / name)


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    return words
