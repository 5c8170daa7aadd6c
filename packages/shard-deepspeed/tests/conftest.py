"""What this session has: float16 parameters on CPUs, even those for whose lack of instructions DeepSpeed takes none."""

from __future__ import annotations

import os

from shard_deepspeed.own_device import FLOAT16_ON_CPU

os.environ[FLOAT16_ON_CPU] = "1"  # before ranks are started, which have the environment of that moment
