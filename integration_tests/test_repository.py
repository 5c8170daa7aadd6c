"""What holds for the repository as a whole: its rooms, its names, its budgets, and what importing costs."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from backends import SOURCES
from faces import behind_the_faces
from packaging.requirements import Requirement
from packaging.version import Version

import shard_core

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core"
BACKENDS = sorted(file.parent for file in ROOT.glob("packages/[!_]*/pyproject.toml"))
ROOMS_OF_ALL = ("__init__", "plugin", "strategy")
ROOMS = {
    *("__init__", "py.typed", "__pycache__", "plugin", "config", "strategy"),
    *("collectives", "precision", "checkpoint", "launcher", "tuning", "_versions"),
}
#: What only one engine has, and so no room of the house is for.
OWN_ROOMS = {
    "shard_tp": {"adapters", "consistency", "dropout", "outputs", "plan"},
    "shard_deepspeed": {"engine_config", "own_device", "zero"},
}
TORCHLESS = (
    *("capability", "coordinator", "errors", "options", "plugins", "strategies.plugin"),
    *("cli.main", "cli.list", "cli.show", "checkpoint", "testing"),
)
NAMELESS = {"utils", "helpers", "common", "base", "misc"}
MOST_LINES = 400
MOST_FILES = 18

TEMPLATE = ROOT / "packages" / "_template"  # kept to the same rules, though nothing finds it as a distribution

each_distribution = pytest.mark.parametrize("folder", [CORE, TEMPLATE, *BACKENDS], ids=lambda folder: folder.name)
each_backend = pytest.mark.parametrize("folder", [TEMPLATE, *BACKENDS], ids=lambda folder: folder.name)


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def package(folder: Path) -> Path:
    return folder / "src" / project(folder)["name"].replace("-", "_")


@functools.cache
def noxfile() -> dict:
    return runpy.run_path(str(ROOT / "noxfile.py"))


def sources() -> list[Path]:
    places = ("core", "packages", "integration_tests", "docs")
    return [*ROOT.glob("*.py"), *(file for place in places for file in (ROOT / place).rglob("*.py"))]


def modules_without_torch() -> list[str]:
    # Options are one file or, where there are many, a folder of that name.
    rooms = [room for folder in BACKENDS for room in package(folder).iterdir() if room.stem in ("plugin", "config")]
    of_backends = [f"{room.parent.name}.{room.stem}" for room in rooms]
    packages = ["shard_core", *(package(folder).name for folder in BACKENDS)]
    return sorted([*packages, *(f"shard_core.{name}" for name in TORCHLESS), *of_backends])


@pytest.mark.parametrize("module", modules_without_torch())
def test_importing_reaches_no_torch(module):
    # Of backends in environments of their own only the sources are here.
    check = f"import sys; sys.path += {SOURCES!r}; import {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_shard_core_is_this_projects_and_not_a_strangers():
    origin = json.loads(importlib.metadata.distribution("shard-core").read_text("direct_url.json"))
    assert origin["url"] == CORE.as_uri()
    assert Path(shard_core.__file__).parent == package(CORE)


@each_distribution
def test_distribution_is_complete(folder):
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (package(folder) / "py.typed").exists()
    assert (folder / "README.md").read_text().startswith(f"# {project(folder)['name']}\n")


@each_distribution
def test_changelog_tells_of_the_version(folder):
    found = re.findall(r"^## (\d+\.\d+\.\d+)", (folder / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert found == sorted(found, key=Version, reverse=True)
    assert found[0] == project(folder)["version"]


@each_distribution
def test_siblings_are_required_by_range(folder):
    siblings = {project(other)["name"]: project(other)["version"] for other in (CORE, *BACKENDS)}
    found = [Requirement(text) for text in project(folder)["dependencies"]]
    for requirement in (each for each in found if each.name in siblings):
        assert {spec.operator for spec in requirement.specifier} == {">=", "<"}
        assert requirement.specifier.contains(siblings[requirement.name])
    assert folder == CORE or "shard-core" in {each.name for each in found}


@each_backend
def test_backend_has_only_the_rooms_of_the_house(folder):
    found = {entry.name.removesuffix(".py") for entry in package(folder).iterdir()}
    assert found <= ROOMS | OWN_ROOMS.get(package(folder).name, set())
    assert set(ROOMS_OF_ALL) <= found


@each_backend
def test_backend_imports_only_public_names_of_core(folder):
    private = [
        f"{file.name}: {name}"
        for file in package(folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shard_core")
        for name in (*node.module.split("."), *(alias.name for alias in node.names))
        if name.startswith("_")
    ]
    assert private == []


def test_noxfile_finds_every_distribution():
    found = noxfile()["DISTRIBUTIONS"]
    assert found == {project(folder)["name"]: folder for folder in (CORE, *BACKENDS)}


@pytest.mark.parametrize(
    ("room", "imported", "broken"),
    [
        ("shard_b/strategy.py", "shard_core.errors", []),
        ("shard_b/strategy.py", "shard_a.strategy", ["Backends import core, never one another"]),
        ("shard_core/errors.py", "shard_a.strategy", ["Core imports no backend"]),
    ],
)
def test_layers_are_checked_among_the_distributions_found(tmp_path, room, imported, broken):
    for name in ("shard_core/__init__", "shard_core/errors", *(f"shard_{k}/{n}" for k in "ab" for n in ROOMS_OF_ALL)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").touch()
    (tmp_path / room).write_text(f"import {imported}\n")
    layers_of = noxfile()["layers_of"]
    (tmp_path / "layers.toml").write_text(layers_of(["shard-core", "shard-a", "shard-b"]))
    linter = (str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--config", "layers.toml")
    found = subprocess.run(
        linter, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert re.findall(r"^(.*) BROKEN$", found.stdout, flags=re.MULTILINE) == broken
    assert found.returncode == bool(broken)


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("packages/a/src/a/strategy.py", "from shard_core.backend import TorchEngine", None),
        (
            "packages/a/src/a/strategy.py",
            "from shard_core.strategy.engine import Engine",
            "from shard_core.strategy.engine",
        ),
        ("packages/a/tests/test_a.py", "import shard_core.testing.oracle", "from shard_core.testing.oracle"),
        ("packages/a/src/a/config/layout.py", "from shard_core.backend import DataRanks", "from shard_core.backend"),
        ("docs/page.md", "```python\n>>> from shard_core.errors import ShardError\n```", "from shard_core.errors"),
        ("docs/page.md", "`shard_core.errors` holds all errors.", None),
        (
            "docs/page.md",
            "```python\nfrom shard_core import (\n    Strategy,\n    mesh,\n)\n```",
            "mesh from shard_core",
        ),
        (
            "packages/a/src/a/strategy.py",
            "from shard_core.checkpoint import format",
            "format from shard_core.checkpoint",
        ),
        ("packages/a/src/a/strategy.py", "from shard_core import plugins, get_strategy", None),
    ],
)
def test_an_import_past_a_face_is_found(tmp_path, file, text, found):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / "README.md").touch()
    (tmp_path / file).write_text(text)
    assert [line.partition(";")[0] for line in behind_the_faces(tmp_path)] == (
        [f"{file} imports {found}"] if found else []
    )


def test_every_room_has_a_face_and_holds_few_files():
    for room in {file.parent for file in package(CORE).rglob("*.py")}:
        assert ast.get_docstring(ast.parse((room / "__init__.py").read_text())), room
        assert len(list(room.glob("*.py"))) <= MOST_FILES, room


def test_ci_runs_the_readmes_command():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^python3 noxfile\.py -s \w+", readme, flags=re.MULTILINE)
    assert commands[:2] == ["python3 noxfile.py -s train", "python3 noxfile.py -s test"]
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == commands[1]


@pytest.mark.parametrize("file", sorted(ROOT.glob("constraints/*.txt")), ids=lambda file: file.stem)
def test_constraints_are_exact(file):
    pins = [Requirement(line) for line in file.read_text().splitlines() if not line.startswith("#")]
    assert [str(pin) for pin in pins if [each.operator for each in pin.specifier] != ["=="]] == []
    required = {Requirement(text).name for text in project(CORE)["dependencies"]}
    assert required <= {pin.name for pin in pins}


def test_files_keep_to_their_budget():
    counted = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in sources()}
    assert {name: lines for name, lines in counted.items() if lines > MOST_LINES} == {}


def test_files_are_named_by_what_they_hold():
    assert [file for file in sources() if {file.stem, file.parent.name} & NAMELESS] == []


def test_reference_shows_every_member_of_a_strategy():
    page = (ROOT / "docs" / "reference" / "strategy.md").read_text()
    shown = re.findall(r"^\.\. auto\w+:: shard_core\.Strategy\.(\w+)$", page, flags=re.MULTILINE)
    members = [name for name in dir(shard_core.Strategy) if not name.startswith(("_", "engine_"))]
    assert sorted(shown) == sorted(members)


#: Who may pickle: a user's own objects between ranks, a launch's own files and pipes, the kit's own processes; and who
#: reads others' pickles without executing anything.
PICKLING = {
    *("collectives/messages.py", "launcher/rank_call.py", "launcher/pickling.py"),
    "data/sharing.py",  # for digests: what it pickles nobody reads
    *("checkpoint/interop/inert_pickle.py", "checkpoint/interop/torch_file.py"),
    *("testing/processes/fresh_process.py", "testing/processes/rank.py", "testing/processes/world.py"),
    *("testing/suites/launcher.py", "testing/suites/plugin/construction.py"),
}


def pickles(file: Path) -> bool:
    """Return whether a module imports pickle, or calls what of torch pickles on the way between ranks."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import) and {alias.name for alias in node.names} & {"pickle", "cloudpickle", "dill"}:
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pickle"):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "strategy":
            continue  # a strategy's own all_gather_object pickles nothing
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if re.fullmatch(r"\w+_object_list|(all_)?gather_object|scatter_object\w*", name):
                return True
    return False


def test_only_these_modules_pickle():
    found = {
        file.relative_to(package(folder)).as_posix()
        for folder in (CORE, *BACKENDS)
        for file in package(folder).rglob("*.py")
        if pickles(file)
    }
    assert found == PICKLING
