"""Every job of this repository; ``python3 noxfile.py -l`` lists them and ``-s NAME`` runs one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import venv
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints"
ENVIRONMENTS = ROOT / ".nox"
WHEELS = ROOT / "dist"
CONFORMANCE = Path("tests", "test_conformance.py")
PROGRAMS = "integration_tests/test_programs.py"
KIT = ("core/src/shard_core/testing", "core/tests/testing", f"core/{CONFORMANCE}")
ON_EACH_TORCH = ("collectives/test_process_group.py", "precision", "strategies", "strategy")
MINIMUM_PYTHON = (3, 11)
TOOLS = (
    *("pytest", "pytest-timeout", "hypothesis", "moto[server]", "s3fs"),
    *("ruff", "codespell", "mypy", "import-linter", "nox"),
    *("sphinx", "myst-parser", "furo"),
    *("build", "hatchling"),
)
NO_TESTS = 5  # how pytest ends when nothing was left to run
SLOWEST = "--durations=15"  # what to move to `long` if a run takes too long
LONGEST = 3600
LANES = 3  # on two cores: a test of ranks waits for part of its time, for the disk, for time to run out
PRINTING = threading.Lock()
# Most of what a rank does is to import torch, and a sixth of that to look for garbage among what is there to stay.
SELDOM = "import gc; gc.set_threshold(10_000)\n"
BACKEND_LAYERS = """\
[tool.importlinter]
root_packages = {packages}

[[tool.importlinter.contracts]]
name = "Core imports no backend"
type = "forbidden"
source_modules = ["shard_core"]
forbidden_modules = {backends}

[[tool.importlinter.contracts]]
name = "Backends import core, never one another"
type = "independence"
modules = {backends}
"""
EXAMPLE = "docs/examples/train_gpt.py"
TRAIN_DEVICES = 2
TRAIN_STEPS = 300
IMPORT_STRATEGIES = (
    "import sys; from shard_core.plugins import find, load_object; "
    "[load_object(find(name).factory, sys.argv[1]) for name in sys.argv[2:]]"
)


def make(home: Path, pins: Path, requirements: list[str], below: Path | None = None, made_from: str = "") -> Path:
    """Make a virtual environment, unless it stands already and what it is made from is unchanged.

    Args:
        home: Where it is to stand.
        pins: The constraints file that holds the versions.
        requirements: What to install, in one pip command.
        below: Another environment whose packages this one sees as installed.
        made_from: Text that, when it changes, has the environment made anew.

    Returns:
        ``home``.
    """
    stamp = home / "made-from.txt"
    recipe = "\n".join([str(home), sys.version, pins.read_text(), *requirements, str(below), made_from])
    if stamp.exists() and stamp.read_text() == recipe:
        return home
    print(f"Making {home.relative_to(ROOT)}: {', '.join(requirements)}", file=sys.stderr, flush=True)
    venv.create(home, clear=True, with_pip=True)
    if below:
        (site_packages(home) / "below.pth").write_text(f"{site_packages(below)}\n")
    pip = [str(home / "bin" / "python"), "-m", "pip", "--no-input", "--disable-pip-version-check"]
    # Of what lies on torch most is never imported: what is, is compiled then.
    options = ["--no-compile"] if below else []
    subprocess.run([*pip, "install", "-qq", *options, "-c", str(pins), *requirements], check=True)
    stamp.write_text(recipe)
    return home


def site_packages(home: Path) -> Path:
    """Return where an environment keeps its packages."""
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home)}))


def start_nox() -> None:
    """Continue under nox in a private environment, so that Python is all one needs to have."""
    if sys.version_info < MINIMUM_PYTHON:
        wanted, found = (".".join(map(str, each[:2])) for each in (MINIMUM_PYTHON, sys.version_info))
        sys.exit(f"Shard needs Python {wanted} or newer and this is {found}; use a newer one.")
    try:
        home = make(ENVIRONMENTS / "nox", CONSTRAINTS / "main.txt", ["nox"])
    except subprocess.CalledProcessError as error:
        sys.exit(f"Cannot make .nox/nox ({error}); on Debian and Ubuntu install the package python3-venv.")
    python = str(home / "bin" / "python")
    os.execv(python, [python, "-m", "nox", "-f", __file__, *sys.argv[1:]])


if __name__ == "__main__":
    start_nox()

import nox  # noqa: E402 - there only once start_nox has put it there
from packaging.requirements import Requirement  # noqa: E402 - comes with nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["test"]

DISTRIBUTIONS = {
    nox.project.load_toml(file)["project"]["name"]: file.parent
    for file in (ROOT / "core" / "pyproject.toml", *sorted(ROOT.glob("packages/[!_]*/pyproject.toml")))
}
each_distribution = nox.parametrize("dist", [nox.param(name, id=name) for name in DISTRIBUTIONS])


@nox.session
def train(session: nox.Session) -> None:
    """Train a small GPT on real text over two processes; options after -- go to the example."""
    defaults = ("--devices", str(TRAIN_DEVICES), "--steps", str(TRAIN_STEPS))
    run(session, "main", "python", EXAMPLE, *defaults, *session.posargs)


@nox.session
def quick(session: nox.Session) -> None:
    """Run lint, types, layers and the tests that start no ranks: the inner loop of work on the code."""
    run_all(session, [["lint", "types", "layers"], *([f"tests({dist})"] for dist in DISTRIBUTIONS)], "--quick")


@nox.session
def test(session: nox.Session) -> None:
    """Run all the sessions below, a few at a time, go on after a failure, and sum up at the end."""
    # The long ones first, so that none of them is left over at the end; builds share a folder.
    kinds = {kind: [f"{kind}({dist})" for dist in DISTRIBUTIONS] for kind in ("tests_and_conformance", "build")}
    _, *backends = kinds["tests_and_conformance"]
    each = [[name] for name in ("core", "kit", "integration", "programs", *reversed(backends))]
    run_all(session, [*each, kinds["build"], ["lint", "types", "layers"], ["docs"]])


@nox.session
@each_distribution
def tests(session: nox.Session, dist: str) -> None:
    """Run a distribution's own tests and the examples in its docstrings; options after -- go to pytest."""
    folder = DISTRIBUTIONS[dist]
    places = (f"{folder / 'src'}", f"{folder / 'tests'}", f"--ignore={folder / CONFORMANCE}")
    run(session, environment_of(dist), "pytest", SLOWEST, *places, *session.posargs)


@nox.session
@each_distribution
def conformance(session: nox.Session, dist: str) -> None:
    """Hold a distribution's strategies to the contract; options after -- go to pytest."""
    suite = DISTRIBUTIONS[dist] / CONFORMANCE
    if not suite.exists():
        session.skip(f"{dist} has no {CONFORMANCE}")
    run(session, environment_of(dist), "pytest", SLOWEST, str(suite), *session.posargs)


@nox.session
@each_distribution
def tests_and_conformance(session: nox.Session, dist: str) -> None:
    """Run both in one process, whose ranks import an engine once; options after -- go to pytest."""
    folder = DISTRIBUTIONS[dist]
    run(session, environment_of(dist), "pytest", SLOWEST, f"{folder / 'src'}", f"{folder / 'tests'}", *session.posargs)


@nox.session
def core(session: nox.Session) -> None:
    """Run core's tests but for those of the conformance kit; options after -- go to pytest."""
    places = ("core/src", "core/tests", *(f"--ignore={place}" for place in KIT))
    run(session, "main", "pytest", SLOWEST, *places, *session.posargs)


@nox.session
def kit(session: nox.Session) -> None:
    """Run the tests of the conformance kit, and core's own conformance; options after -- go to pytest."""
    run(session, "main", "pytest", SLOWEST, *KIT, *session.posargs)


@nox.session
def other_torches(session: nox.Session) -> None:
    """Run what core asks of torch on the other versions of it that are pinned; options after -- go to pytest."""
    core = DISTRIBUTIONS["shard-core"]
    for name in set(environments()) - {"main"}:
        run(session, name, "pytest", *(str(core / "tests" / room) for room in ON_EACH_TORCH), *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Run the tests across distributions, by what a user does; options after -- go to pytest."""
    places = ("integration_tests", f"--ignore={PROGRAMS}")
    run(session, "main", "pytest", SLOWEST, *places, *session.posargs, settings=pythons())


@nox.session
def programs(session: nox.Session) -> None:
    """Judge strategies by random training programs; options after -- go to pytest."""
    run(session, "main", "pytest", SLOWEST, PROGRAMS, *session.posargs)


@nox.session
def long(session: nox.Session) -> None:
    """Run what takes minutes and `test` leaves out, the other torches too; options after -- go to pytest."""
    places = [(environment_of(dist), folder / "tests") for dist, folder in DISTRIBUTIONS.items()]
    for name, place in (*places, ("main", ROOT / "integration_tests")):
        chosen = (str(place), "-m", "long", f"--timeout={LONGEST}")
        run(session, name, "pytest", *chosen, *session.posargs, settings=pythons(), success_codes=(0, NO_TESTS))
    for name in set(environments()) - {"main"}:
        kit = (str(DISTRIBUTIONS["shard-core"] / CONFORMANCE), "-k", "TestDDP and 2ranks")
        run(session, name, "pytest", *kit, *session.posargs)
    session.notify("other_torches")


@nox.session
def new(session: nox.Session) -> None:
    """Make a new backend: its name after --, and --to DIR if it is not to stand in this repository."""
    with session.chdir(session.invoked_from):
        session.run(sys.executable, str(ROOT / "packages" / "new_backend.py"), *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, layout and spelling."""
    run(session, "main", "ruff", "check", ".")
    run(session, "main", "ruff", "format", "--check", ".")
    run(session, "main", "codespell")


@nox.session
def types(session: nox.Session) -> None:
    """Check every annotation strictly, each distribution where its libraries are."""
    backends = ("packages/_template/src", "integration_tests/zero1/src")
    run(session, "main", "mypy", "--strict", "noxfile.py", "packages/new_backend.py", *backends)
    for name in environments():
        run(session, name, "mypy", "--strict", *(str(folder / "src") for folder in members(name).values()))


@nox.session
def layers(session: nox.Session) -> None:
    """Check who imports whom: inside core, past its faces, and among the distributions that are found."""
    run(session, "main", "lint-imports", "--no-logo")
    run(session, "main", "python", "integration_tests/faces.py")
    for name in environments():
        settings = Path(session.create_tmp()) / f"{name}.toml"
        settings.write_text(layers_of(members(name)))
        run(session, name, "lint-imports", "--no-logo", "--config", str(settings))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation without a single warning, and run the code in it."""
    strict = ("--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "-d", "docs/_build/doctrees")
    anew = ("--fresh-env", "--write-all")
    run(session, "main", "sphinx-build", *strict, *anew, "-b", "html", "docs", "docs/_build/html")
    run(session, "main", "sphinx-build", *strict, "-b", "doctest", "docs", "docs/_build/doctest")


@nox.session
@each_distribution
def build(session: nox.Session, dist: str) -> None:
    """Build wheel and sdist, install our wheels alone into an empty environment, run `shard list`."""
    name = environment_of(dist)
    ours = {each: folder for each, folder in members(name).items() if each in ("shard-core", dist)}
    for each, folder in ours.items():
        for old in WHEELS.glob(f"{each.replace('-', '_')}-*"):
            old.unlink()
        run(session, name, "python", "-m", "build", "--no-isolation", "--outdir", str(WHEELS), str(folder))
    commands = empty_environment(name, list(ours))
    from_wheels = ("install", "-qq", "--no-index", "--find-links", str(WHEELS))
    session.run(str(commands / "python"), "-m", "pip", *from_wheels, *ours, external=True)
    session.run(str(commands / "shard"), "list", external=True)
    strategies = project(dist).get("entry-points", {}).get("shard.strategies", ())
    session.run(str(commands / "python"), "-c", IMPORT_STRATEGIES, dist, *strategies, external=True)


def run_all(session: nox.Session, jobs: Sequence[Sequence[str]], *options: str) -> None:
    """Run jobs side by side, each of one or more sessions in a nox of its own, and fail if one of them does.

    Args:
        session: Who waits for them.
        jobs: The names of sessions, job by job.
        options: What the sessions pass on to pytest.
    """
    with ThreadPoolExecutor(LANES) as lanes:
        list(lanes.map(environment, environments()))
        codes = lanes.map(lambda job: run_apart(job, options), jobs)
        failed = [" ".join(job) for job, code in zip(jobs, codes, strict=True) if code]
    if failed:
        session.error(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}")


def run_apart(sessions: Sequence[str], options: Sequence[str]) -> int:
    """Run sessions in a nox of their own, and print at the end what they printed."""
    nox_again = [sys.executable, "-m", "nox", "-f", __file__, "-s", *sessions, "--", *options]
    ran = subprocess.run(nox_again, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    with PRINTING:
        sys.stdout.buffer.write(ran.stdout)
        sys.stdout.flush()
    return ran.returncode


def layers_of(dists: Iterable[str]) -> str:
    """Write for import-linter who may import whom among distributions; core is one of them."""
    packages = [dist.replace("-", "_") for dist in dists]
    return BACKEND_LAYERS.format(packages=packages, backends=[each for each in packages if each != "shard_core"])


def run(
    session: nox.Session,
    name: str,
    command: str,
    *arguments: str,
    settings: Mapping[str, str] | None = None,
    success_codes: Iterable[int] = (0,),
) -> None:
    """Run a command of a shared environment, with its other commands within reach."""
    commands = environment(name)
    path = os.pathsep.join((str(commands), str(torch_alone(name) / "bin"), os.environ["PATH"]))
    variables = {"PATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(settings or {})}
    # Containers often forbid it, and then each of some thousand ranks compiles all our modules again.
    variables["PYTHONDONTWRITEBYTECODE"] = ""
    session.run(str(commands / command), *arguments, env=variables, external=True, success_codes=success_codes)


def environment(name: str) -> Path:
    """Return the commands all sessions share: the tools, and our distributions as they stand here."""
    folders = members(name).values()
    ours = [f"--editable={folder}[testing]" for folder in folders]
    projects = "\n".join((folder / "pyproject.toml").read_text() for folder in folders)
    home = make(ENVIRONMENTS / name, pins(name), [*ours, *TOOLS], below=torch_alone(name), made_from=projects)
    seldom = site_packages(home) / "collect-seldom.pth"
    if not seldom.exists():
        seldom.write_text(SELDOM)
    return home / "bin"


def empty_environment(name: str, ours: list[str]) -> Path:
    """Return the commands of a new environment that has what ours declare they need, but not ours."""
    declared = {text for dist in ours for text in project(dist)["dependencies"]}
    foreign = sorted(text for text in declared if Requirement(text).name not in DISTRIBUTIONS)
    home = ENVIRONMENTS / f"{name}-wheels"
    shutil.rmtree(home, ignore_errors=True)
    return make(home, pins(name), foreign, below=torch_alone(name)) / "bin"


def torch_alone(name: str) -> Path:
    """Return an environment with torch alone, for others to lie on: it is large and seldom changes."""
    return make(ENVIRONMENTS / f"{name}-torch", pins(name), ["torch"])


def environment_of(dist: str) -> str:
    """Return which environment a distribution lives in: its own where it has its own pins, else main."""
    own = dist.removeprefix("shard-")
    return own if pins(own).exists() else "main"


def pythons() -> dict[str, str]:
    """Return, for tests across distributions, where the interpreters of all environments are."""
    return {"SHARD_PYTHONS": os.pathsep.join(str(environment(name) / "python") for name in environments())}


def environments() -> list[str]:
    """List the environments that the distributions live in."""
    return sorted({environment_of(dist) for dist in DISTRIBUTIONS})


def members(name: str) -> dict[str, Path]:
    """List the distributions of an environment; core is in each."""
    return {
        dist: folder for dist, folder in DISTRIBUTIONS.items() if dist == "shard-core" or environment_of(dist) == name
    }


def pins(name: str) -> Path:
    """Return where an environment's tested versions stand."""
    return CONSTRAINTS / f"{name}.txt"


def project(dist: str) -> dict[str, Any]:
    """Read what a distribution says about itself."""
    table: dict[str, Any] = nox.project.load_toml(DISTRIBUTIONS[dist] / "pyproject.toml")["project"]
    return table
