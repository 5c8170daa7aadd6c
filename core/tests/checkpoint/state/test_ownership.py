from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import fixtures
import numpy as np
import pytest
from fixtures.scripts import environment

from shard_core.checkpoint.format.tiling import tiling_flaw

MESHES = ("2x2", "3x2")


@pytest.fixture(scope="module")
def meshes():
    script = Path(fixtures.__file__).with_name("simulated_mesh.py")
    done = subprocess.run(
        [sys.executable, str(script), *MESHES],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(MESHES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("mesh", MESHES)
def test_written_boxes_tile_every_tensor_of_a_mesh_of_two_axes(meshes, mesh):
    held, written = defaultdict(list), defaultdict(list)
    shapes = {}
    owners = Counter()
    for rank, key, shape, offsets, sizes, write in meshes[mesh]:
        shapes[key] = shape
        held[key].append((offsets, sizes))
        if write:
            written[key].append((offsets, sizes))
            owners[rank] += int(np.prod(sizes)) > 0
    assert len(shapes) == 8
    for key, shape in shapes.items():
        offsets, sizes = (np.array(column).reshape(-1, len(shape)) for column in zip(*written[key], strict=True))
        assert tiling_flaw(shape, offsets, sizes) is None, key
        # Whoever does not write holds a copy of what somebody writes.
        boxes = {(tuple(a), tuple(b)) for a, b in written[key] if np.prod(b)}
        assert {(tuple(a), tuple(b)) for a, b in held[key] if np.prod(b)} == boxes, key
    assert len(owners) == max(rank for rank, *_ in meshes[mesh]) + 1
