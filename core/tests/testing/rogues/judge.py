"""Judges rogues as an author's own test file would: installs them, writes the file, runs it, reads what came of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from rogues.plugin import FACTORIES

_PLUGINS = {"imports_torch": "rogues.eager_plugin"}
_VAGUE = ("names_no_versions",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Which promises judge a rogue.

    Attributes:
        suites: Beginnings of suites' names, such as ``training`` or ``checkpoint.safety``; ``""`` means all.
        spared: Promises that are left out all the same.
        world_sizes: At how many ranks.
    """

    suites: tuple[str, ...]
    spared: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = (2,)


def judge(folder: Path, trials: Mapping[str, Trial], seconds: float) -> dict[str, dict[str, str]]:
    """Run the kit on rogues in one session of pytest.

    Args:
        folder: Where to write.
        trials: What to judge each rogue by.
        seconds: How long that may take.

    Returns:
        For each rogue what became of each promise: ``""`` if it is kept, ``"not judged"``, or how it is broken.
    """
    _install(folder, "shard-rogues", set(FACTORIES) - set(_VAGUE), requires="Requires-Dist: shard-core>=1,<2\n")
    _install(folder, "shard-vague", _VAGUE, requires="")
    (folder / "trials.json").write_text(json.dumps({name: dataclasses.asdict(trial) for name, trial in trials.items()}))
    authors = [_author(name, trial) for name, trial in trials.items()]
    (folder / "test_trials.py").write_text("\n\n".join([_HEADER, *authors]))
    (folder / "pytest.ini").write_text("[pytest]\n")
    paths = [str(folder), str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    output, outcomes = folder / "output.txt", folder / "outcomes.json"
    with output.open("w") as printed:
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "rogues.fixtures", "-p", "no:cacheprovider", "test_trials.py"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdout=printed,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    assert outcomes.exists(), f"the rogues could not be judged:\n{output.read_text()}"
    judged: dict[str, dict[str, str]] = json.loads(outcomes.read_text())
    return judged


_HEADER = "from shard_core.testing import Conformance\n"


def _author(name: str, trial: Trial) -> str:
    """Write what the author of a rogue would write to have it judged."""
    return f"class Test_{name}(Conformance):\n    strategy = {name!r}\n    world_sizes = {trial.world_sizes}\n"


def _install(folder: Path, distribution: str, names: Collection[str], *, requires: str) -> None:
    info = folder / f"{distribution.replace('-', '_')}-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0.0\n{requires}")
    entries = [f"{name} = {_PLUGINS.get(name, 'rogues.plugin')}" for name in sorted(names)]
    (info / "entry_points.txt").write_text("\n".join(["[shard.strategies]", *entries, ""]))
