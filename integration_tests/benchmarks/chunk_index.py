"""What the index of chunks costs at the scale of an 8B model on 16,384 simulated ranks: over 10 million chunks.

Run it with ``python integration_tests/benchmarks/chunk_index.py``. One process reads the rank indexes of all ranks,
joins them, checks the result and writes it, as the rank that commits does; then another one reads that index and plans
the reads of one of 1,000 ranks. It prints seconds, of the wall and of the processor, and the most memory each process
had. Making up the records takes a minute or two and is not counted.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xxhash

from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.format.chunk_index import BLOCK_BYTES, Chunk, ChunkIndex, TensorRecord
from shard_core.checkpoint.save.merge import merge_rank_indexes
from shard_core.checkpoint.save.rank_index import decode_rank_index, encode_rank_index, index_of
from shard_core.checkpoint.storage.interface import FileRecord

TENSORS, READERS, ATTEMPT = 640, 1000, "0123456789ab"


def tensors(ranks: int) -> list[TensorRecord]:
    """List weights and two moments of some 8 billion parameters, each split over all ranks along its first dim."""
    shapes = [(2 * ranks, 128), (ranks, 256), (4 * ranks, 64), (ranks,)]
    return [TensorRecord(key=f"optim.{n:03d}", dtype="F32", shape=shapes[n % 4]) for n in range(TENSORS)]


def files(ranks: int, length: int) -> list[FileRecord]:
    return [
        FileRecord(path=f"optim-{rank:05d}-of-{ranks:05d}.safetensors", bytes=length, digest="0" * 16)
        for rank in range(ranks)
    ]


def make_parts(ranks: int, folder: Path) -> None:
    """Write the rank indexes of all ranks."""
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
        (folder / f"part-{rank}").write_bytes(encode_rank_index(ATTEMPT, index))


class Cost:
    """What was spent since it was made."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        wall, processor = time.perf_counter() - self._wall, time.process_time() - self._processor
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        return f"{wall:.2f} s, {processor:.2f} s of a processor, peak {peak:.2f} GB"


def commit(ranks: int, folder: Path) -> None:
    cost = Cost()
    raws = ((folder / f"part-{rank}").read_bytes() for rank in range(ranks))
    index = merge_rank_indexes(decode_rank_index(raw, ATTEMPT) for raw in raws)
    index.check_tiling()
    raw = index.to_bytes()
    xxhash.xxh3_64_hexdigest(raw)
    (folder / "index").write_bytes(raw)
    print(f"read parts, join, check, write: {len(index):,} chunks, {len(raw) / 1e6:.0f} MB, {cost}")


def plan(ranks: int, folder: Path) -> None:
    known = tensors(ranks), files(ranks, sum(tensor.bytes for tensor in tensors(ranks)) // ranks)
    cost = Cost()
    raw = (folder / "index").read_bytes()
    xxhash.xxh3_64_hexdigest(raw)
    index = ChunkIndex.from_bytes(raw, *known)
    index.check_tiling()
    reads = 0
    for tensor in index.tensors:
        rows = -(-tensor.shape[0] // READERS)
        box = Box((rows * (READERS // 2),) + (0,) * (len(tensor.shape) - 1), (rows, *tensor.shape[1:]))
        reads += sum(1 for _ in index.overlaps(tensor.key, box))
    print(f"read, check, plan: {reads:,} reads, {cost}")


def check(ranks: int, folder: Path) -> None:
    known = tensors(ranks), files(ranks, sum(tensor.bytes for tensor in tensors(ranks)) // ranks)
    index = ChunkIndex.from_bytes((folder / "index").read_bytes(), *known)
    cost = Cost()
    index.check_places()
    print(f"what verify checks besides: {cost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        PHASES[args.phase](args.ranks, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        for phase in PHASES:  # each in a process of its own, which measures its own peak
            command = [sys.executable, __file__, "--ranks", str(args.ranks), "--phase", phase, "--folder", folder]
            subprocess.run(command, check=True)


PHASES = {"parts": make_parts, "commit": commit, "plan": plan, "check": check}

if __name__ == "__main__":
    main()
