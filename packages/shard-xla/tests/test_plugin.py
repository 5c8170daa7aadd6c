"""Whether the strategies can run here is found out from metadata alone."""

from __future__ import annotations

import importlib.metadata

import pytest

from shard_core.testing import run_python
from shard_xla.plugin import shard_unavailable

ASK = """
import importlib.metadata, sys
real = importlib.metadata.version
pretended = dict(pair.split("=") for pair in sys.argv[1].split(",") if pair)
def version(name):
    if pretended.get(name) == "none":
        raise importlib.metadata.PackageNotFoundError(name)
    return pretended.get(name) or real(name)
importlib.metadata.version = version
from shard_core import StrategyUnavailable, get_strategy
try:
    get_strategy("xla_fsdp")
except StrategyUnavailable as error:
    print(error)
print("torch_xla" in sys.modules)
"""


def test_it_can_run_here() -> None:
    assert shard_unavailable("xla_fsdp") is None
    assert shard_unavailable("xla_spmd") is None


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ("torch=2.13.0", ("torch_xla 2.9.0", "torch 2.13.0", "pip install torch==2.9.0")),
        ("torch_xla=none", ("torch_xla is not installed", "pip install torch==2.9.0 torch_xla==2.9.0")),
    ],
)
def test_torch_of_another_version_is_named_with_the_cure(versions: str, words: tuple[str, ...]) -> None:
    outcome = run_python(["-c", ASK, versions])
    sentence, imported = outcome.output.splitlines()
    assert all(word in sentence for word in words), sentence
    assert imported == "False"


def test_local_versions_are_the_same_version() -> None:
    assert importlib.metadata.version("torch").startswith("2.9.0")
