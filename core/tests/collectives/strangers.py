"""What the ranks in ``test_strangers`` do; launched processes import it by its name."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shard_core.checkpoint import SaveHandle, ShardedCheckpointIO, async_save
from shard_core.errors import ShardError

#: A process of its own, which knows nothing but where the store listens: it plants a pickle that runs code.
_STRANGER = """
import os, pickle, sys
import torch.distributed as dist

class Payload:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}",)

host, port, keys = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), sys.argv[2:]
store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
for key in keys:
    store.set(key, pickle.dumps(Payload()))
"""


def plant(evidence: Path, *keys: str) -> None:
    """Write values as a stranger under keys of the store that the ranks meet at."""
    without_secret = {name: value for name, value in os.environ.items() if name != "SHARD_SECRET"}
    command = [sys.executable, "-c", _STRANGER, str(evidence), *keys]
    subprocess.run(command, check=True, timeout=60, env=without_secret)


class WaitsForRankOne(ShardedCheckpointIO):
    """Writes on rank 0 only once rank 1 has failed, whose messages rank 0 would else answer before they are read."""

    def __init__(self, rank: int, failed: Path) -> None:
        super().__init__()
        self.rank = rank
        self.failed = failed

    def save(self, path: Any, state: Any, values: Any, *, coordinator: Any, **options: Any) -> SaveHandle:
        assert options.pop("blocking") is False

        def write(state: Any, values: Any, side_channel: Any) -> None:
            end = time.monotonic() + 60
            while self.rank == 0 and not self.failed.exists() and time.monotonic() < end:
                time.sleep(0.01)
            ShardedCheckpointIO().save(path, state, values, coordinator=side_channel, **options)

        return async_save(path, state, values, coordinator, write)


def save_beside_a_stranger(strategy: Any, folder: Path) -> None:
    """Save in the background after a stranger has put a pickle where rank 0's answers come; keep the error."""
    model = torch.nn.Linear(2, 2)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    if strategy.global_rank == 0:
        plant(
            folder / "ran", *(f"shard/0/0/side_channel/{line}/{call}/all" for line in range(4) for call in range(1, 20))
        )
    strategy.barrier()
    strategy.checkpoint_io = WaitsForRankOne(strategy.global_rank, folder / "rank-1")
    handle = strategy.save_checkpoint(folder / "c", {"model": model, "optimizer": optimizer}, blocking=False)
    try:
        handle.committed.result()
    except ShardError as error:
        (folder / f"rank-{strategy.global_rank}").write_text(str(error))
