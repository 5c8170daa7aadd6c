"""The vocabulary of random programs: their operations by name, in which ways, and what each changes by itself."""

from __future__ import annotations

from typing import Any

from shard_core.testing.programs import operations as ops

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in ops.Operation.__args__}
"""The operations by name."""
TOUCHES: dict[str, tuple[type[Any], ...]] = {
    "trained": (ops.Freeze, ops.Backward, ops.Attempt),
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
        ops.Attempt,
    ),
    "generator": (
        *(ops.Backward, ops.Closure, ops.Forward, ops.Evaluate, ops.ShowAverage, ops.Initialize, ops.Seed),
        ops.Attempt,
    ),
}
"""What operations change by themselves before a strategy could refuse them; a refusal leaves the rest alone."""
PREMATURE: dict[type[Any], str] = {
    ops.Step: "step", ops.ClipNorm: "norm", ops.ClipValue: "value", ops.ShowGradients: "gradients"
}  # fmt: skip
"""What has to be refused while gradients wait for a backward that sends them, and the name of the failure."""
ZEROING = ("zeroed", "cleared", "dropped")
"""Backwards between whose forward and whose backward the gradients of before are thrown away."""
WAYS: dict[type[Any], tuple[str, ...]] = {
    ops.Backward: (
        "plain", "retain_graph", "two_forwards", "crossed", "gradient", "method", "contrastive", "through", "frozen",
        "eval", "penalty", "by hand", "accumulated", "zeroed", "cleared", "dropped", "detached",
        "squares", "layers", "slopes", "slopes by hand",
    ),
    ops.Forward: (
        "train", "eval", "no_grad", "inference", "unwrap", "method", "interrupted", "failed", "failed evaluation",
        "interrupted by hand",
    ),
    ops.EditGradients: ("multiplied", "infinite", "clipped", "assigned", "data", "foreach", "counted", "groups' data"),
    ops.EditWeights: ("in place", "data", "groups", "groups' data"),
    ops.Load: ("path", "latest", "modules"),
    ops.Fail: (
        "save", "background", "unwaited", "load", "object", "set up", "foreign", "form", "axis", "layer", "steps",
        *PREMATURE.values(),
    ),
    ops.Reduce: ("mean", "sum", "max", "gather", "dict"),
}  # fmt: skip
"""What ``how`` may be, where an operation has it."""
VARIANTS: dict[tuple[type[Any], str], tuple[str, ...]] = {
    (ops.Forward, "interrupted"): ("interrupted by hand",),
    (ops.Forward, "train"): ("interrupted by hand",),
    (ops.Backward, "method"): ("layers",),
    (ops.Backward, "cleared"): ("dropped",),
    (ops.Backward, "by hand"): ("slopes by hand",),
    (ops.Backward, "penalty"): ("slopes",),
    (ops.EditGradients, "multiplied"): ("foreach",),
    (ops.EditGradients, "assigned"): ("counted",),
    (ops.EditGradients, "data"): ("groups' data",),
    (ops.EditWeights, "in place"): ("groups",),
    (ops.EditWeights, "data"): ("groups' data",),
    (ops.Fail, "load"): ("object",),
    (ops.Fail, "save"): ("set up", "axis"),
    (ops.Fail, "background"): ("foreign", "layer"),
    (ops.Fail, "unwaited"): ("form", "steps"),
}
"""Ways that are drawn in the place of others, so that seeds go on drawing what they have drawn."""
FLAGS: dict[type[Any], tuple[dict[str, Any], ...]] = {
    ops.Step: ({"by_hand": True},),
    ops.Closure: ({"by_hand": True},),
    ops.Save: ({"frozen": False},),
    ops.Initialize: ({"forgets": True}, {"restarts": True}),
    ops.ReloadOptimizer: ({"shown": False},),
}
"""Fields that are drawn so in place of their defaults."""


def drawn_ways(kind: type[Any]) -> tuple[str, ...]:
    """List the ways that are drawn of themselves."""
    varied = {way for (of, _), ways in VARIANTS.items() if of is kind for way in ways}
    return tuple(how for how in WAYS[kind] if how not in varied and how not in PREMATURE.values())
