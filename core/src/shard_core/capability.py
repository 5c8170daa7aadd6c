"""The promises a strategy may or may not make; everything else in the interface is mandatory."""

from __future__ import annotations

import enum


class Capability(enum.Enum):
    """One optional promise; the value is the sentence users read.

    A declared capability is held to its test by the conformance kit; an undeclared one raises
    ``MissingCapability`` when it is used.

    Example:
        >>> Capability.FP16.value
        'trains in float16, with gradient scaling where the precision asks for it'
    """

    MULTIPLE_OPTIMIZERS = "takes several optimizers for one module"
    CLIP_VALUE = "clips gradients by value"
    CLIP_ANY_NORM = "clips gradients by norms other than 2"
    DEFER_SYNC = "skips gradient traffic on all but the last micro-batch"
    FP16 = "trains in float16, with gradient scaling where the precision asks for it"
    META_INIT = "builds a module without any rank holding all of it"
    INFERENCE = "sets up a module without an optimizer"
    CLOSURE = "lets the optimizer evaluate the loss again through a closure"
    COMPILE = "runs modules that torch.compile has compiled"
    SYNC_GRADS = "gathers tensors so that gradients flow back to the rank they came from"
    DENOMINATOR = "weighs ragged micro-batches by a denominator counted over all ranks"
    ANY_OPTIMIZER = "steps any optimizer, not only those that work element by element"
    CPU_OFFLOAD = "keeps parameters and optimizer state in host memory between uses"
    ENTRY_METHODS = "runs methods other than forward on a set-up module"
    SEVERAL_MODULES = "sets up several modules in one process"
    UNFREEZE = "trains parameters that were frozen at setup"
