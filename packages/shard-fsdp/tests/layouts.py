"""The names under which options for units are looked at, and what places each on two ranks."""

from __future__ import annotations

from typing import Any

#: ``hsdp`` shards over both ranks here, so that messages of units are those of ``fsdp``.
LAYOUTS: dict[str, dict[str, Any]] = {"fsdp": {}, "fsdp_cpu_offload": {}, "hsdp": {"device_mesh": (1, 2)}}
