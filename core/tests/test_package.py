from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys

import pytest

import shard_core
from shard_core import errors

TORCH_FREE = (
    "shard_core",
    "shard_core.plugins",
    "shard_core.checkpoint",
    "shard_core.testing",
    "shard_core.selection",
    "shard_core.run_options",
    "shard_core.strategies.plugin",
    "shard_core.cli.main",
    "shard_core.cli.list",
    "shard_core.cli.show",
    "shard_core.cli.doctor",
    "shard_core.coordinator",
)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_reaches_no_torch(module):
    program = f"import sys, {module}; assert not {{'torch', 'numpy', 'rich'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_strategies_are_imported_without_torchs_compiler():
    program = "import sys, shard_core.strategies.ddp; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_there():
    assert shard_core.__all__ == sorted(shard_core.__all__)
    assert dir(shard_core) == shard_core.__all__
    for name in shard_core.__all__:
        assert getattr(shard_core, name) is not None


def test_every_error_is_public():
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    found = {each.__name__ for each in classes if issubclass(each, errors.ShardError)}
    assert found == {name for name in shard_core.__all__ if hasattr(errors, name)}


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="module 'shard_core' has no attribute 'get_stratgy'"):
        shard_core.get_stratgy  # noqa: B018 - looking it up is the test


def test_version_is_that_of_the_distribution():
    assert shard_core.__version__ == importlib.metadata.version("shard-core")
