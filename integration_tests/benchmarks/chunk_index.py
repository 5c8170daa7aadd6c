"""What the index of chunks costs at the scale of an 8B model on 16,384 simulated ranks: over 10 million chunks.

Run it with ``python integration_tests/benchmarks/chunk_index.py``. The rank that commits joins all part records and
checks the result; then another process reads the index and plans the reads of one of 1,000 ranks. It prints seconds and
the most memory each process had. Making up the records takes a minute or two and is not counted.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from shard_core.checkpoint.box import Box
from shard_core.checkpoint.index import Chunk, ChunkIndex, TensorRecord
from shard_core.checkpoint.merging import merge_parts
from shard_core.checkpoint.part import Part, decode_part, encode_part, index_of
from shard_core.checkpoint.storage.record import FileRecord
from shard_core.checkpoint.tensor_file import BLOCK_BYTES

TENSORS, READERS, ATTEMPT = 640, 1000, "0123456789ab"


def tensors(ranks: int) -> list[TensorRecord]:
    """Weights and two moments of some 8 billion parameters, each split over all ranks along its first dim."""
    shapes = [(2 * ranks, 128), (ranks, 256), (4 * ranks, 64), (ranks,)]
    return [TensorRecord(key=f"optim.{n:03d}", dtype="F32", shape=shapes[n % 4]) for n in range(TENSORS)]


def files(ranks: int, length: int) -> list[FileRecord]:
    return [
        FileRecord(path=f"optim-{rank:05d}-of-{ranks:05d}.safetensors", bytes=length, digest="0" * 16)
        for rank in range(ranks)
    ]


def parts(ranks: int, spent: list[float]) -> Iterator[Part]:
    """Give each rank's part as it is read from the disk; add the seconds that its making takes to ``spent``."""
    started = time.perf_counter()
    chunks, end = {}, 0
    for tensor in tensors(ranks):
        box = Box((0,) * len(tensor.shape), (tensor.shape[0] // ranks, *tensor.shape[1:]))
        size = tensor.bytes // ranks
        chunks[tensor.key] = [Chunk(file=0, begin=end, box=box, digests=[end] * -(-size // BLOCK_BYTES))]
        end += size
    index = index_of(tensors(ranks), [], chunks)
    step = np.array([2, 0, 1, 0, 4, 0, 1])  # how far the four shapes' boxes move from rank to rank
    for rank, file in enumerate(files(ranks, end)):
        index.columns["offsets"] = step * rank
        index.files = (file,)
        raw = encode_part(ATTEMPT, index)
        spent[0] += time.perf_counter() - started
        yield decode_part(raw, ATTEMPT)
        started = time.perf_counter()


def peak() -> float:
    """Most memory this process had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def commit(ranks: int, path: Path) -> None:
    spent = [0.0]
    started = time.perf_counter()
    index = merge_parts(parts(ranks, spent))
    index.check()
    raw = index.to_bytes()
    seconds = time.perf_counter() - started - spent[0]
    print(f"join, check, encode: {len(index):,} chunks, {seconds:.2f} s, {len(raw) / 1e6:.0f} MB, peak {peak():.2f} GB")
    path.write_bytes(raw)


def plan(ranks: int, path: Path) -> None:
    known = tensors(ranks), files(ranks, sum(tensor.bytes for tensor in tensors(ranks)) // ranks)
    started = time.perf_counter()
    raw = path.read_bytes()
    xxhash.xxh3_64_hexdigest(raw)
    index = ChunkIndex.from_bytes(raw, *known)
    index.check()
    reads = 0
    for tensor in index.tensors:
        rows = -(-tensor.shape[0] // READERS)
        box = Box((rows * (READERS // 2),) + (0,) * (len(tensor.shape) - 1), (rows, *tensor.shape[1:]))
        reads += sum(1 for _ in index.overlaps(tensor.key, box))
    print(f"read, check, plan: {reads:,} reads, {time.perf_counter() - started:.2f} s, peak {peak():.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        PHASES[args.phase](args.ranks, args.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "index.safetensors")
        for phase in PHASES:  # each in a process of its own, which tells its own peak
            command = [sys.executable, __file__, "--ranks", str(args.ranks), "--phase", phase, "--file", str(path)]
            subprocess.run(command, check=True)


PHASES = {"commit": commit, "plan": plan}

if __name__ == "__main__":
    main()
