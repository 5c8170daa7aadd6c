"""The template is a whole backend: what is made from it installs, is found, keeps the contract, and goes again."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from environments import ROOT, Environment, build_wheel, run, succeed

SCRIPT = "packages/new_backend.py"
PACKAGE = runpy.run_path(str(ROOT / SCRIPT))
#: Of the kit a part at one size is enough to see that the package is in order; `nox -s long` runs all of it.
SOME = "not TestMirror or (2ranks and (setup or clip or averag or checkpoint))"


def listed(environment: Environment, folder: Path) -> dict[str, str]:
    output = succeed(environment.python("-m", "shard_core", "list", "--json", folder=folder))
    return {each["name"]: each["package"] for each in json.loads(output)}


@pytest.fixture
def installed(tmp_path) -> tuple[Environment, Path]:
    """Build a backend outside the repository and install its wheel beside core."""
    project = PACKAGE["make"]("mirror", tmp_path / "outside")
    environment = Environment(tmp_path / "environment")
    environment.install(build_wheel(project, tmp_path / "wheels"))
    return environment, project


@pytest.mark.timeout(900)
def test_a_backend_from_outside_comes_trains_and_goes(installed):
    environment, project = installed
    assert listed(environment, project)["mirror"] == "shard-mirror"
    succeed(environment.python("-m", "pytest", "-q", "tests", "-k", SOME, folder=project, timeout=800))
    environment.uninstall("shard-mirror")
    assert "mirror" not in listed(environment, project)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_backend_from_outside_keeps_the_contract_at_every_size(installed):
    environment, project = installed
    succeed(environment.python("-m", "pytest", "-q", "tests", folder=project, timeout=900))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_programs_find_nothing_in_a_backend_from_outside(installed):
    environment, project = installed
    succeed(environment.python("-m", "shard_core.testing", "mirror", "--programs", "100", folder=project, timeout=800))


@pytest.fixture
def repository(tmp_path) -> Path:
    """Copy of the repository what a new backend touches, and what looks for it."""
    home = tmp_path / "repository"
    for name in ("packages", "docs/backends", "constraints", "core/src"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "noxfile.py", "pyproject.toml", "core/pyproject.toml"):
        shutil.copy(ROOT / name, home / name)
    return home


def new(folder: Path, *words: str):
    return run(folder, sys.executable, str(folder / SCRIPT), *words)


def test_a_new_backend_of_the_repository_is_found_and_documented(repository):
    output = succeed(new(repository, "my_own"))
    assert 'python3 noxfile.py -s "conformance(shard-my-own)"' in output
    look = "import runpy; print(*runpy.run_path('noxfile.py')['DISTRIBUTIONS'])"
    assert "shard-my-own" in succeed(run(repository, sys.executable, "-c", look)).split()
    project = tomllib.loads((repository / "packages" / "shard-my-own" / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["shard.strategies"] == {"my_own": "shard_my_own.plugin"}
    row = "| `my_own` | shard-my-own | to fill in: what it does, in one line |"
    index = (repository / "docs" / "backends" / "index.md").read_text()
    for page in ((repository / "README.md").read_text(), index):
        assert f"|\n{row}\n\n" in page
    assert index.endswith("\nmy_own\n```\n")
    assert (repository / "docs" / "backends" / "my_own.md").read_text().startswith("# `my_own`\n")
    again = new(repository, "my_own")
    assert again.returncode == 1
    assert again.stderr == "'my_own' is taken: shard-my-own has a strategy of that name; choose another.\n"


def test_what_is_made_leaves_open_what_it_does(repository):
    succeed(new(repository, "my_own"))
    made = repository / "packages" / "shard-my-own"
    open_ones = (made / "README.md", made / "src/shard_my_own/plugin.py", repository / "docs/backends/my_own.md")
    assert [file.name for file in open_ones if "to fill in: " not in file.read_text().lower()] == []
    others = (made / "pyproject.toml", made / "CHANGELOG.md", made / "src/shard_my_own/__init__.py")
    assert [file.name for file in (*open_ones, *others) if "averag" in file.read_text()] == []


def test_nothing_of_the_template_is_left(repository):
    succeed(new(repository, "templates"))
    made = repository / "packages" / "shard-templates"
    for file in (each for each in made.rglob("*") if each.is_file() and each.name != "LICENSE"):
        assert "template" not in (str(file.relative_to(made)) + file.read_text()).lower().replace("templates", "")


@pytest.mark.parametrize("name", ["a", "zebra", "as_long_as_a_name_may_be"])
def test_what_is_made_is_in_good_style(repository, name):
    succeed(new(repository, name))
    made = "packages/shard-" + name.replace("_", "-")
    for command in (("check",), ("format", "--check")):
        succeed(run(repository, str(Path(sys.executable).with_name("ruff")), *command, "--no-cache", made))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fsdp", "'fsdp' is taken: shard-fsdp has a strategy of that name"),
        ("ddp", "'ddp' is taken: shard-core has a strategy of that name"),
        ("core", "'core' is reserved"),
        ("template", "'template' is reserved"),
        *(
            (name, f"{name!r} cannot be a strategy's name")
            for name in ("class", "Mirror", "my-own", "_x", "2d", "a__b")
        ),
        ("a" * 25, "up to 24 small letters, digits"),
    ],
)
def test_bad_names_are_refused(tmp_path, name, reason):
    refused = new(ROOT, name, "--to", str(tmp_path))
    assert refused.returncode == 1
    assert reason in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "shard-mirror").mkdir()
    refused = new(ROOT, "mirror", "--to", str(tmp_path))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"{tmp_path / 'shard-mirror'} is there already")
    assert list((tmp_path / "shard-mirror").iterdir()) == []
