from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from shard_core.cli import checkpoint
from shard_core.cli.main import VERBS, main


def test_help_names_every_verb():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.partition("Commands:\n")[2].splitlines()] == list(VERBS)


def test_every_verb_speaks_json():
    for verb in ("list", "show", "doctor", *(f"checkpoint {name}" for name in checkpoint.command.commands)):
        assert "--json" in CliRunner().invoke(main, [*verb.split(), "--help"]).stdout


def test_unknown_verb():
    result = CliRunner().invoke(main, ["lst"])
    assert result.exit_code == 2
    assert "No such command 'lst'" in result.stderr


def test_unknown_strategy_is_one_sentence_and_status_2():
    result = subprocess.run(
        [sys.executable, "-m", "shard_core", "show", "dpd"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: no installed package offers a strategy 'dpd'; did you mean 'ddp'?")
    assert result.stderr.count("\n") == 1


def test_broken_backend_is_one_sentence_and_status_1(site):
    site.install("shard-toy", entries={"shard.strategies": {"toy": "toy_cli"}}, modules={"toy_cli": "import a_library"})
    result = CliRunner().invoke(main, ["show", "toy"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: shard-toy is installed, but its module 'toy_cli' cannot be imported")


WRITTEN_WITH = {"click", "packaging", "pluggy"}  # what else a command imports, every command pays for at its start


@pytest.mark.parametrize("verb", [["list"], ["list", "--json"], ["show", "ddp"], ["show", "ddp", "--json"]])
def test_imports_little(verb):
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from shard_core.cli.main import main\n"
        f"main({verb!r}, standalone_mode=False)\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(n for n in names - sys.stdlib_module_names if not n.startswith('shard_')), file=sys.stderr)\n"
        "assert not {'asyncio', 'multiprocessing', 'ssl', 'unittest'} & names\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stderr.split()) == WRITTEN_WITH | (set() if "--json" in verb else {"rich"})
