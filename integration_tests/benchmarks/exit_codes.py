"""Whether ranks exit in peace: many short training runs under torchrun, and how many of them did not end with 0.

Run it with ``python integration_tests/benchmarks/exit_codes.py --launches 100``. Each launch trains a few steps
and leaves; the worker threads of gloo must not outlive the interpreter (see ``shard_core.collectives.shutdown``).
"""

import argparse
import collections
import os
import subprocess
import sys
from typing import Any

import torch
from rich.progress import track

from shard_core import get_strategy
from shard_core.testing import models


def train(strategy: Any) -> None:
    with strategy.module_init_context():
        model = models.make("gpt")
    optimizer = models.make_optimizer("adamw", model)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    for batch in models.batches("gpt", 5, 12):
        loss = model(*models.share(batch, strategy.global_rank, strategy.world_size))
        strategy.backward(loss, model)
        strategy.clip_gradients_norm(model, optimizer, 1.0)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=100)
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--ranks", type=int, default=3)
    args = parser.parse_args()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), __file__]
    environment = {**os.environ, "SHARD_STRATEGY": args.strategy, "OMP_NUM_THREADS": "1"}
    codes = collections.Counter(
        subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False).returncode
        for _ in track(range(args.launches), description=f"{args.strategy} at {args.ranks} ranks")
    )
    print(dict(sorted(codes.items())))
    return 0 if set(codes) <= {0} else 1


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.set_num_threads(1)
        get_strategy().launch(train)
    else:
        sys.exit(main())
