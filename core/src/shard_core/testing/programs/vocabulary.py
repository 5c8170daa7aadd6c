"""The vocabulary of random programs: their operations by name, in which ways, and what each changes by itself."""

from __future__ import annotations

from typing import Any

from shard_core.testing.programs import operations as ops

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in ops.Operation.__args__}
"""The operations by name."""
TOUCHES: dict[str, tuple[type[Any], ...]] = {
    "trained": (ops.Freeze, ops.Backward),
    # Before a step, or clipped by a norm, they are divided by denominators, once.
    "gradients": (
        ops.Backward,
        ops.Closure,
        ops.ClipNorm,
        ops.EditGradients,
        ops.Forward,
        ops.Step,
        ops.ZeroByHand,
        ops.ZeroGrad,
    ),
    "generator": (ops.Backward, ops.Closure, ops.Forward, ops.Evaluate, ops.ShowAverage, ops.Initialize, ops.Seed),
}
"""What operations change by themselves before a strategy could refuse them; a refusal leaves the rest alone."""
WAYS: dict[type[Any], tuple[str, ...]] = {
    ops.Backward: (
        "plain", "retain_graph", "two_forwards", "crossed", "gradient", "method", "contrastive", "through", "frozen",
        "eval", "penalty", "by hand", "accumulated", "zeroed", "cleared", "detached", "squares",
    ),
    ops.Forward: (
        "train", "eval", "no_grad", "inference", "unwrap", "method", "interrupted", "failed", "failed evaluation",
    ),
    ops.EditGradients: ("multiplied", "infinite", "clipped", "assigned", "data"),
    ops.EditWeights: ("in place", "data"),
    ops.Load: ("path", "latest", "modules"),
    ops.Fail: ("save", "background", "unwaited", "load"),
    ops.Reduce: ("mean", "sum", "max", "gather", "dict"),
}  # fmt: skip
"""What ``how`` may be, where an operation has it."""
