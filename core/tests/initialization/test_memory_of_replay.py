"""The memory of the whole process, measured in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import resource, sys, torch
from torch import nn
from shard_core.initialization.recording import record

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def build(width):
    with record() as recording:
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(12))).to(torch.bfloat16)
        optimizer = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=0.1)
    state = {f"{k}.state": optimizer.state[p]["sum"] for k, p in enumerate(module.parameters())}
    counts = []
    recording.replay({**dict(module.named_parameters()), **state}, lambda name, value: counts.append(value.numel()))
    assert len(counts) == 48, counts

build(8)
before = peak()
build(1024)
print(peak() - before)
"""


def test_the_process_grows_by_a_few_tensors_and_not_by_the_model():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    one_layer_in_float32 = 1024 * 1024 * 4
    # The model in float32 is 12 layers, in bfloat16 with its optimizer state another 12.
    assert int(run.stdout) < 5 * one_layer_in_float32
