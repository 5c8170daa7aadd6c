from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.cli.main import main
from shard_core.collectives.single import SingleCollectives


@pytest.fixture
def checkpoint(tmp_path):
    collectives = SingleCollectives()
    collectives.connect(0, 1, torch.device("cpu"))
    state = TensorState({"model": torch.nn.Linear(4, 4)}, {}, rank=0, world_size=1)
    path = tmp_path / "run" / "step-1"
    ShardedCheckpointIO().save(path, state, {"step": 1}, coordinator=collectives, information={})
    return path


def _verify(*arguments):
    return CliRunner().invoke(main, ["checkpoint", "verify", *map(str, arguments)])


def test_a_fine_checkpoint_is_reported_as_fine(checkpoint):
    result = _verify(checkpoint)
    assert (result.exit_code, result.output) == (0, f"{checkpoint}: fine (2 tensors, 0.0 MB).\n")
    result = _verify(checkpoint, "--json")
    assert result.exit_code == 0
    assert json.loads(result.output) == {
        "path": str(checkpoint),
        "tensors": 2,
        "bytes": 80,
        "damage": [],
        "is_fine": True,
    }


def test_every_damaged_tensor_is_named(checkpoint):
    path = checkpoint / "model-00000-of-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    raw[-80] ^= 1
    path.write_bytes(raw)
    result = _verify(checkpoint)
    assert result.exit_code == 1
    for name in ("model.weight", "model.bias"):
        assert f"- {name} in {path.name}: its bytes are not those that were written" in result.output
    result = _verify(checkpoint, "--json")
    assert result.exit_code == 1
    assert {damage["tensor"] for damage in json.loads(result.output)["damage"]} == {"model.weight", "model.bias"}
    path.unlink()
    result = _verify(checkpoint)
    assert result.exit_code == 1
    assert f"- model.weight in {path.name}: its bytes are lost" in result.output


def test_a_save_that_was_never_committed_is_no_checkpoint(checkpoint):
    (checkpoint / "manifest.json").unlink()
    result = _verify(checkpoint)
    assert result.exit_code == 2
    assert "A save into it was not completed" in result.output


def test_paths_that_are_no_checkpoint_are_unusable(checkpoint, tmp_path):
    for path in (checkpoint.parent, tmp_path / "nowhere", checkpoint / "manifest.json"):
        result = _verify(path)
        assert result.exit_code == 2
        assert str(path) in result.output
    assert _verify().exit_code == 2
    assert f"it holds these checkpoints: '{checkpoint}'" in _verify(checkpoint.parent).output


def test_verifying_needs_no_torch(checkpoint):
    code = (
        "import sys; from shard_core.checkpoint.inspection.verify import verify; "
        f"assert verify({str(checkpoint)!r}).is_fine; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
