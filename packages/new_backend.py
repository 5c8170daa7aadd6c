"""A new backend, made from the template; ``python3 noxfile.py -s new -- NAME`` runs this file."""

from __future__ import annotations

import argparse
import keyword
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "packages" / "_template"
PAGE = "page.md"
TABLE = "| name | package | what it does |"
MOST_LETTERS = 24
RESERVED = {"core": "shard-core is the package all backends stand on", "template": "all others are made from it"}
BUILD_LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info", "dist", ".*_cache")

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_IMPORTS = re.compile(r"(?:^from shard_.*\n){2,}", flags=re.MULTILINE)

NEXT = """\
Made {folder}: the strategy {name!r}, complete, and green as it is. See it keep the contract:

  {check}

Then make it yours: the engine is in src/{package}/strategy.py, what it can do is declared in plugin.py, and its
options are in config.py. Say what it does where "to fill in" stands, in its texts and in the lists of backends.
docs/tutorials/write-a-backend.md goes through the engine piece by piece."""
INSIDE = 'python3 noxfile.py -s "conformance({dist})"'
OUTSIDE = """\
pip install -e {core} -e "{folder}[testing]"
  python -m pytest {folder}/tests"""


class Refusal(ValueError):
    """A name or a place that a backend cannot have."""


def make(name: str, home: Path | None = None) -> Path:
    """Copy the template and rename it throughout.

    Args:
        name: The word users will type.
        home: The folder to put the package into; by default this repository, whose pages then list it.

    Returns:
        The package's folder.

    Raises:
        Refusal: If there is something in the way.
    """
    check(name)
    folder = (home or ROOT / "packages") / rename("shard-template", name)
    if folder.exists():
        raise Refusal(f"{folder} is there already; remove it, or choose another name or --to another folder.")
    shutil.copytree(TEMPLATE, folder, ignore=BUILD_LEFTOVERS)
    for file in sorted(folder.rglob("*"), reverse=True):  # what is in a folder comes before the folder
        if file.is_file() and file.name != "LICENSE":
            file.write_text(rename(file.read_text(), name))
        file.rename(file.with_name(rename(file.name, name)))
    if home is None:
        list_in_pages(name, folder)
    (folder / PAGE).unlink(missing_ok=True)
    return folder


def check(name: str) -> None:
    """Check that a name can be a strategy's and that nobody has it.

    Args:
        name: The word users will type.

    Raises:
        Refusal: With a sentence that says why.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or len(name) > MOST_LETTERS:
        raise Refusal(
            f"{name!r} cannot be a strategy's name; take up to {MOST_LETTERS} small letters, digits and single "
            "underscores that begin with a letter and are no keyword of Python."
        )
    if name in RESERVED:
        raise Refusal(f"{name!r} is reserved: {RESERVED[name]}; choose another name.")
    for file in (ROOT / "core" / "pyproject.toml", *sorted(ROOT.glob("packages/[!_]*/pyproject.toml"))):
        project = tomllib.loads(file.read_text())["project"]
        if name in project.get("entry-points", {}).get("shard.strategies", {}):
            raise Refusal(f"{name!r} is taken: {project['name']} has a strategy of that name; choose another.")


def rename(text: str, name: str) -> str:
    """Replace the template's name by another, wherever it stands.

    Args:
        text: A file's text or name.
        name: The word users will type.

    Returns:
        The text with ``name``, its imports in order.
    """
    words = {
        "shard-template": f"shard-{name.replace('_', '-')}",
        "template": name,
        "Template": "".join(word.capitalize() for word in name.split("_")),
        "TEMPLATE": name.upper(),
    }
    text = re.sub("|".join(words), lambda match: words[match[0]], text)
    return _IMPORTS.sub(lambda match: "".join(sorted(match[0].splitlines(keepends=True), key=_module)), text)


def list_in_pages(name: str, folder: Path) -> None:
    """Write the page of a backend of this repository, and its rows in the lists of backends.

    Args:
        name: Its strategy.
        folder: Its package.
    """
    backends = ROOT / "docs" / "backends"
    (folder / PAGE).rename(backends / f"{name}.md")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    summary = re.findall(r'summary="(.*)"', next(folder.glob("src/*/plugin.py")).read_text())[0]
    for page in (ROOT / "README.md", backends / "index.md"):
        row = f"| `{name}` | {project['name']} | {summary} |\n"
        page.write_text(re.sub(rf"^{re.escape(TABLE)}\n(?:\|.*\n)+", rf"\g<0>{row}", page.read_text(), flags=re.M))
    index = backends / "index.md"
    index.write_text(re.sub(r"(^```{toctree}\n.*?)^```", rf"\1{name}\n```", index.read_text(), flags=re.M | re.S))


def main() -> None:
    """Read the command line, make the backend and print what to do next."""
    parser = argparse.ArgumentParser(prog="python3 noxfile.py -s new --", description=__doc__)
    parser.add_argument("name", help="the word users will type, e.g. mirror")
    parser.add_argument("--to", type=Path, metavar="DIR", help="put the package into DIR, not into this repository")
    arguments = parser.parse_args()
    try:
        folder = make(arguments.name, arguments.to and arguments.to.resolve())
    except Refusal as refusal:
        sys.exit(str(refusal))
    place = folder.relative_to(ROOT) if arguments.to is None else folder
    checks = (INSIDE if arguments.to is None else OUTSIDE).format(dist=folder.name, folder=place, core=ROOT / "core")
    package = rename("shard_template", arguments.name)
    print(NEXT.format(folder=place, name=arguments.name, package=package, check=checks))


def _module(line: str) -> str:
    return line.split()[1]


if __name__ == "__main__":
    main()
