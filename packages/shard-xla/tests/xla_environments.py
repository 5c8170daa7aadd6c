"""The environments that ranks on XLA are started with."""

from __future__ import annotations

#: Compiling takes most of the time; what is compiled in tests runs a few times only. The last flag saves two thirds.
#: Of what ranks have compiled for hundreds of models they keep the newest: it is mapped in pieces, of which Linux lets
#: a process have 65,530, and the next one ends in LLVM's "Cannot allocate memory" and a signal.
HASTY = {
    "XLA_COMPILATION_CACHE_SIZE": "64",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false",
}


def spread_over(devices: int) -> dict[str, str]:
    """Start the process in SPMD mode, which a rank's reset between tests must not take away."""
    return {**HASTY, "CPU_NUM_DEVICES": str(devices), "XLA_USE_SPMD": "1"}
