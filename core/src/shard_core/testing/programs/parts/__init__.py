"""What the models of random programs are put together from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core.testing.programs.parts.hooks import HOOKS, Framed
from shard_core.testing.programs.parts.layers import LAYERS, Extra
from shard_core.testing.programs.parts.parameters import PARAMETERS
from shard_core.testing.programs.parts.part import LENGTH, VOCABULARY, WIDTH, Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = [
    "LENGTH",
    "PARTS",
    "PLAN",
    "SKIPPING",
    "SLOPE_ONCE",
    "VOCABULARY",
    "WIDTH",
    "WRITING",
    "Extra",
    "Framed",
    "Linear",
]

#: How ranks that share layers split them, in the styles of Hugging Face's plans; the other parts stay whole.
PLAN = {
    "linear.layer": "colwise_gather_output",
    "twice.layer": "rowwise_split_input",
    "adapter.down": "colwise",
    "adapter.up": "rowwise",
    "lora.wide": "colwise",
    "lora.narrow": "rowwise",
    "embedding.layer": "colwise_gather_output",
    "experts.experts.*": "colwise_gather_output",
    "dropout.layer": "colwise_gather_output",
    "heads.query": "colwise",
    "heads.key": "colwise",
    "heads.value": "colwise",
    "heads.norm": "replicated_with_grad_allreduce",
    "heads.out": "rowwise",
    "shared.*": "colwise_gather_output",
}
PARTS: dict[str, Callable[[], nn.Module]] = {"linear": Linear, **LAYERS, **PARAMETERS, **HOOKS}
"""The parts by name."""
WRITING = ("clamped", "reassigned", "rewritten")
"""Parts whose forwards write to their parameters."""
FROZEN = ("frozen", "adapter", "lora")
"""Parts with parameters that are not trained."""
SKIPPING = ("extra", "spare")
"""Parts with parameters that some losses, or all, do not reach."""
COMPLEX = ("turned",)
"""Parts with complex parameters."""
SLOPE_ONCE = ("attention", "heads", *COMPLEX)
"""Parts whose kernels torch has no second derivatives of, or whose slopes have no real squares."""
