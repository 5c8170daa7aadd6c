"""What the pages say: their code runs, their commands exist, and their tables are those of the code."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from backends import elsewhere
from click.testing import CliRunner
from forked_scripts import ForkedScripts
from pages import ROOT, page, pages

from shard_core import Capability, RunOptions, ShardError, Strategy, errors, get_strategy, plugins
from shard_core.cli.main import main
from shard_core.options import options_of
from shard_core.plugins import hooks
from shard_core.precision.policies import POLICIES
from shard_core.strategy.engine import Engine

EXAMPLE = "docs/examples/train_gpt.py"
#: Those of packages that live in environments of their own are listed as well; their plugins reach no library.
PRESENT = (*plugins.installed(), *elsewhere())
#: Its code is built step by step in test_write_a_backend.py.
WALKED = "docs/tutorials/write-a-backend.md"
#: Pages whose scripts start so many ranks that they wait for the long run.
TAKE_LONG = (
    *("docs/how-to/load-weights.md", "docs/how-to/save-and-resume.md", "docs/how-to/wrap-a-model.md"),
    *("docs/tutorials/first-run.md", "docs/how-to/average-weights.md", "docs/how-to/evaluate.md"),
    *("core/README.md", "packages/shard-fsdp/README.md", "packages/shard-tp/README.md"),
)
FACES = ("shard_core", "shard_core.plugins", "shard_core.backend", "shard_core.checkpoint", "shard_core.testing")

#: What a reader of a page that shows only the loop has around it.
SURROUNDINGS = {
    "README.md": """
import torch

config = 8

class GPT(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = torch.nn.Linear(width, 1)

    def forward(self, tokens):
        return self.head(tokens).square().mean()

loader = torch.utils.data.DataLoader([{"tokens": torch.ones(8) * k} for k in range(8)], batch_size=2)
""",
    "packages/shard-fsdp/README.md": """
def train(strategy):
    assert strategy.world_size == 2
""",
    "packages/shard-tp/README.md": """
def train(strategy):
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
""",
}


def having(*languages: str, but: str = "") -> pytest.MarkDecorator:
    found = [each for each in pages() if each.blocks(*languages) and each.name != but]
    cases = [pytest.param(each, id=each.name, marks=[pytest.mark.long] * (each.name in TAKE_LONG)) for each in found]
    return pytest.mark.parametrize("each", cases)


def surroundings(folder: Path) -> dict[str, str]:
    # Nothing on a page needs a GPU, and devices=2 must not depend on how many there are.
    settings = {"OMP_NUM_THREADS": "1", "SHARD_STRATEGY": "single", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | settings | {"PYTHONPATH": str(folder / "site")}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = surroundings(folder)
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def forked_scripts() -> Iterator[ForkedScripts]:
    forking = ForkedScripts()
    yield forking
    forking.close()


@having("python", but=WALKED)
def test_python_runs(each, tmp_path, forked_scripts):
    for block in each.blocks("toml", "python"):
        if block.file:
            file = tmp_path / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    if (tmp_path / "pyproject.toml").exists():
        alone = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
        run(tmp_path, sys.executable, "-m", "pip", "install", "-qq", *alone, "--target", "site", ".")
    unnamed = [block for block in each.blocks("python") if not block.file]
    pieces = ["\n".join(block.text for block in unnamed if not block.starts)]
    pieces += [SURROUNDINGS.get(each.name, "") + block.text for block in unnamed if block.starts]
    scripts = [block.file for block in each.blocks("python") if block.file and block.starts]
    for number, piece in enumerate(piece for piece in pieces if piece):
        scripts.append(f"piece{number}.py")
        (tmp_path / scripts[-1]).write_text(piece)
    assert scripts
    for script in scripts:
        if "sys.modules" in (tmp_path / script).read_text():  # what is imported is its subject
            run(tmp_path, sys.executable, script)
            continue
        ended = forked_scripts.run(tmp_path / script, surroundings(tmp_path))
        assert ended.code == 0, ended.printed


@having("pycon")
def test_sessions_show_what_python_says(each, tmp_path):
    (tmp_path / "session.txt").write_text("\n".join(block.text for block in each.blocks("pycon")))
    run(tmp_path, sys.executable, "-m", "doctest", "-o", "ELLIPSIS", "session.txt")


@having("bash", "console")
def test_commands_exist(each):
    scripts = {block.file for other in pages() for block in other.blocks("python")}
    for head, *words in each.commands():
        if head == "shard":
            assert set(options(words)) <= known_options(words), words
        elif head == "pip":
            for folder in (word for word in words if word.startswith("./")):
                assert (ROOT / folder).is_dir() or f'name = "{folder[2:]}"' in each.text
        elif "noxfile.py" in words:
            session, *others = words[words.index("-s") + 1 :]
            session = session.partition("(")[0]
            assert session in re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
            if session == "train":
                assert set(options(others)) - {"--"} <= set(example_options())
        else:
            assert Path(head).name in ("python", "torchrun"), head
            files = {word for word in words if word.endswith(".py")}
            assert {file for file in files if not (ROOT / file).is_file()} <= scripts


def test_names_from_elsewhere_lead_to_names_that_are_here():
    """What tables say to write instead is a member, an argument or an option, or they would lead nowhere."""
    found = page("docs/how-to/choose-a-strategy.md")
    rows = [*found.table("you wrote", "here"), *found.table("there", "here")]
    code = " ".join(row[-1] for row in rows)
    members = {*dir(Strategy), "get_strategy", "zero_grad", "parameters", "save_pretrained"}
    called = set(re.findall(r"(\w+)\(", code)) | set(re.findall(r"strategy\.(\w+)", code))
    assert called <= members, called - members
    signatures = [inspect.signature(getattr(Strategy, name)) for name in called & set(dir(Strategy))]
    options = {each.name for row in PRESENT if row.info for each in row.info.options}
    known = {
        *options,
        *inspect.signature(get_strategy).parameters,
        *(name for one in signatures for name in one.parameters),
    }
    keywords = set(re.findall(r"(\w+)=", code))
    assert keywords <= known, keywords - known
    assert {*re.findall(r'get_strategy\("(\w+)"', code)} <= {each.name for each in PRESENT}


def test_the_tutorial_tells_every_option_of_the_example():
    listed = [row[0] for row in page("docs/tutorials/first-run.md").table("option", "what it does")]
    assert sorted(listed) == sorted(set(example_options()) - {"--help"})


def test_it_is_recorded_of_every_strategy_where_it_was_seen_to_run():
    assert {(each.name, each.package) for each in plugins.seen_strategies()} == {
        (each.name, each.distribution) for each in PRESENT
    }


@pytest.mark.parametrize("name", ["README.md", "docs/backends/index.md"])
def test_strategies_are_those_that_shard_list_shows(name):
    listed = page(name).table("name", "package", "what it does")
    assert sorted(listed) == sorted([each.name, each.distribution, each.summary.replace("`", "")] for each in PRESENT)


def test_pages_list_every_option_of_the_backends():
    places = [each for each in pages() if each.name.startswith("docs/backends/")]
    listed = {tuple(row) for each in places for row in each.table("option", "default", "what it is")}
    known = {(option.name, str(option.default), option.help) for each in PRESENT for option in each.info.options}
    assert listed == known


def test_capabilities_are_those_that_strategies_declare():
    declared = {each.name: each.info.capabilities for each in PRESENT if each.info}
    header = next(line for line in page("docs/backends/index.md").text.splitlines() if line.startswith("| capability"))
    names = re.findall(r"`(\w+)`", header)
    assert sorted(names) == sorted(declared)
    table = page("docs/backends/index.md").table("capability", *names)
    assert table == [[each.name, *("yes" if each in declared[name] else "no" for name in names)] for each in Capability]


def test_precisions_are_those_of_the_table():
    columns = ("parameter", "compute", "reduce", "accumulate", "optimizer", "buffer", "autocast", "scaled")
    listed = page("docs/explanation/precision.md").table("name", *columns)
    shown = {True: "yes", False: "no"}
    values = [[getattr(policy, column) for column in columns] for policy in POLICIES.values()]
    assert listed == [[name, *(shown.get(v, v) for v in row)] for name, row in zip(POLICIES, values, strict=True)]


def names_of_reference() -> dict[str, list[str]]:
    """Read from the code what each page of the reference must show."""
    specified = [name for name, value in vars(hooks).items() if hasattr(value, f"{hooks.PROJECT}_spec")]
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    engine = [name for name in vars(Engine) if name.startswith("engine_")]
    return {
        "capabilities": [each.name for each in Capability],
        "backend": engine,
        "command": [f"shard {verb}" for verb in verbs()] + [name for verb in verbs() for name in own_options(verb)],
        "errors": [each.__name__ for each in classes if issubclass(each, ShardError)],
        "plugins": specified,
        "strategy": [*(o.name for o in options_of(RunOptions)), *inspect.signature(get_strategy).parameters],
    }


@functools.cache
def documented() -> frozenset[str]:
    """Read which names the reference documents, and under which path."""
    text = "".join(file.read_text() for file in (ROOT / "docs/reference").glob("*.md"))
    return frozenset(re.findall(r"^ *\.\. (?:auto|py:)\w+:: (shard_core\.[\w.]+)", text, re.M))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rendered")
    quiet = ("-q", "-W", "-n", "-b", "text", "-d", str(folder / "doctrees"))
    run(folder, sys.executable, "-m", "sphinx", *quiet, str(ROOT / "docs"), str(folder))
    return folder / "reference"


@pytest.mark.long
def test_reference_shows_every_name(rendered):
    for name, expected in names_of_reference().items():
        text = " ".join((rendered / f"{name}.txt").read_text().split())
        assert expected
        assert [each for each in expected if each not in text] == [], name


@pytest.mark.parametrize("face", FACES)
def test_reference_shows_every_public_name(face):
    names = set(importlib.import_module(face).__all__) - {"__version__"}
    assert {name for name in names if not {f"{each}.{name}" for each in FACES} & documented()} == set()


def test_reference_shows_nothing_behind_the_faces():
    names = {f"{face}.{name}" for face in FACES for name in importlib.import_module(face).__all__}
    assert [each for each in documented() if each not in names and each.rpartition(".")[0] not in names] == []


def test_reference_tells_what_every_capability_is():
    header = ("name", "a strategy that declares it", "refused where it is not declared")
    listed = page("docs/reference/capabilities.md").table(*header)
    assert [row[:2] for row in listed] == [[each.name, each.value] for each in Capability]
    assert all(refused for _, _, refused in listed)


@pytest.mark.long
@pytest.mark.parametrize(
    "file", sorted([ROOT / EXAMPLE, *ROOT.glob("packages/[!_]*/src/**/*.py")]), ids=lambda file: file.stem
)
def test_reference_shows_what_backends_and_the_example_import(file, rendered):
    text = "".join(shown.read_text() for shown in rendered.glob("*.txt"))
    imports = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom))
    names = [alias.name for node in imports if node.module.startswith("shard_core") for alias in node.names]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_links_of_front_pages_lead_somewhere():
    for each in (each for each in pages() if not each.name.startswith("docs/")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", each.text):
            assert (each.path.parent / target).exists(), f"{each.name}: {target}"


def options(words: list[str]) -> list[str]:
    before_script = words[: next((k for k, word in enumerate(words) if word.endswith(".py")), len(words))]
    return [word for word in before_script if word.startswith("-")]


def verbs() -> list[str]:
    context = click.Context(main)
    found = []
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        found += [f"{name} {each}" for each in command.commands] if isinstance(command, click.Group) else [name]
    return found


@functools.cache
def help_options(*verb: str) -> frozenset[str]:
    printed = CliRunner().invoke(main, [*verb, "--help"]).output
    return frozenset(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", printed))


def own_options(verb: str) -> frozenset[str]:
    """List a verb's options, without those that it only hands to torchrun."""
    from torch.distributed.run import get_args_parser

    theirs = frozenset(re.findall(r"--?[a-zA-Z][\w-]*", get_args_parser().format_help())) if verb == "run" else set()
    return help_options(*verb.split()) - theirs


def known_options(words: list[str]) -> frozenset[str]:
    verb = max((verb for verb in verbs() if " ".join(words).startswith(verb)), key=len, default="")
    assert verb or options(words)
    return help_options(*verb.split())


@functools.cache
def example_options() -> tuple[str, ...]:
    shown = subprocess.run([sys.executable, str(ROOT / EXAMPLE), "--help"], capture_output=True, text=True, check=True)
    return tuple(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", shown.stdout)))
