from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from written_checkpoints import write

from shard_core.cli.main import main


@pytest.fixture
def checkpoint(tmp_path):
    write(tmp_path, 1)
    return tmp_path / "step-1"


def _export(*arguments):
    return CliRunner().invoke(main, ["checkpoint", "export", *map(str, arguments)])


def test_it_says_what_was_written(checkpoint, tmp_path):
    result = _export(checkpoint, tmp_path / "out", "--dtype", "bf16")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"{tmp_path / 'out'}: 1 file of weights (2 tensors, 40 B, BF16).",
        "- second.weight is tied to first.weight, which stands for both.",
        "- There is no config.json; --config puts one beside the weights, which from_pretrained needs.",
    ]
    weights = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in weights.items()} == dict.fromkeys(
        ("first.weight", "first.bias"), torch.bfloat16
    )


def test_options_reach_it(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "tied"}')
    out = tmp_path / "deep" / "out"
    options = ("--config", tmp_path / "config.json", "--module", "net", "--max-shard-size", "0.064kB", "--json")
    card = json.loads(_export(checkpoint, out, *options).stdout)
    assert card["files"] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert card["tied"] == {"second.weight": "first.weight"}
    assert json.loads((out / "config.json").read_text()) == {"model_type": "tied"}
    result = _export(checkpoint, out)
    assert result.exit_code == 2
    assert "exists; give another folder" in result.stderr
    result = _export(checkpoint, out, "--overwrite", "--prefix", "first.")
    assert result.exit_code == 0
    assert set(safetensors.torch.load_file(out / "model.safetensors")) == {"weight", "bias"}


def test_arguments_that_cannot_be_used(checkpoint, tmp_path):
    out = tmp_path / "out"
    for arguments, message in [
        ((tmp_path, out), "it holds these checkpoints"),
        ((checkpoint, out, "--dtype", "int8"), "dtype 'int8' is none of"),
        ((checkpoint, out, "--max-shard-size", "much"), "'much' is no size; write it like 5GB"),
        ((checkpoint, out, "--module", "nett"), "did you mean 'net'?"),
        ((checkpoint, out, "--config", tmp_path / "nowhere"), "cannot be read"),
    ]:
        result = _export(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert not out.exists()


def test_damage_is_found_wanting(checkpoint, tmp_path):
    path = checkpoint / "model-00000-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    result = _export(checkpoint, tmp_path / "out")
    assert result.exit_code == 1
    assert "1 tensor is damaged: 'model.first." in result.stderr
