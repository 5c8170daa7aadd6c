"""What the first batches of ranks are compared by."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys

import torch

from shard_core.data.sharing import digest


@dataclasses.dataclass
class _Sample:
    text: str
    ids: torch.Tensor


def _batch(end=3.0):
    view = torch.arange(8.0)[1::2].clone()
    view[-1] = end
    return {
        "tensor": [torch.ones(2, 3).t(), torch.tensor(1, dtype=torch.bfloat16), torch.empty(0)],
        "view": view,
        "array": torch.arange(6).reshape(2, 3).numpy().T,
        "sample": _Sample("".join(["a", "b"]), torch.ones(2, dtype=torch.complex64)),
        "others": ("".join(["a", "b"]), 1, 2.5, None, b"c", {"x", "y", "z"}),
    }


def test_digests_are_those_of_values():
    assert digest(_batch()) == digest(copy.deepcopy(_batch()))
    assert len({digest(_batch()), digest(_batch(4.0)), digest(torch.ones(2)), digest(torch.ones(2, 1))}) == 4
    assert digest(torch.zeros(2)) != digest(torch.zeros(2, dtype=torch.int32))
    once = "".join(["a", "b"])
    assert digest([once, once]) == digest([once, "".join(["a", "b"])])
    assert digest({"x": {lambda: 1}}) is None


def test_digests_do_not_depend_on_the_process():
    program = "from shard_core.data.sharing import digest; print(digest([{'x', 'y', 'z', 'w'}, 'text', 1.5]))"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    assert found == digest([{"x", "y", "z", "w"}, "text", 1.5])
