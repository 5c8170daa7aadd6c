"""What a random program may be run with beside its strategy: options and kinds of optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core import plugins

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard_core.plugins.info import StrategyInfo
    from shard_core.testing.programs.program import Program

#: Options and values that change how a strategy computes and never what, as they are written in Python.
OPTIONS: dict[str, tuple[str, ...]] = {
    "unit_bytes": ("1", "1000"),
    "reshard_after_forward": ("True", "False"),
    "activation_checkpointing": ("torch.nn.Linear", "lambda part: isinstance(part, torch.nn.Linear)"),
    "activation_offload": ("True",),
    "bucket_cap_mb": ("0.0001",),
    "gradient_as_bucket_view": ("False",),
    "broadcast_buffers": ("False",),
    "contiguous_gradients": ("False",),
    "overlap_comm": ("False",),
    "reduce_scatter": ("False",),
    "reduce_bucket_size": ("70",),
    "stage": ("0",),
    "sub_group_size": ("100",),
    "param_persistence_threshold": ("0", "20"),
    "auto_wrap_policy": (
        "{torch.nn.Linear}",
        "lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, torch.nn.Linear)",
        "torch.distributed.fsdp.wrap.CustomPolicy(lambda module: isinstance(module, torch.nn.Linear))",
    ),
    "ignored_modules": ("['head']", "['h*']", "[torch.nn.Linear]"),
    "ignored_states": ("['head.bias']",),
    "backward_prefetch": ("2", "None", "torch.distributed.fsdp.BackwardPrefetch.BACKWARD_POST"),
    "forward_prefetch": ("True",),
    "cpu_offload": (
        *("True", "torch.distributed.fsdp.CPUOffload(offload_params=True)", "torch.distributed.fsdp.OffloadPolicy()"),
        "torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)",
    ),
    "mixed_precision": ("torch.distributed.fsdp.MixedPrecision()",),
    "device_mesh": ("(1, 'auto')", "('auto', 1)"),
    "sharding_strategy": ("'SHARD_GRAD_OP'", "'NO_SHARD'", "torch.distributed.fsdp.ShardingStrategy.FULL_SHARD"),
    "defer_sync": ("'nothing'",),
    "state_dict_type": ("'full'", "torch.distributed.fsdp.StateDictType.SHARDED_STATE_DICT"),
    "save_distributed_checkpoint": ("False",),
    "activation_checkpointing_policy": ("{torch.nn.Linear}",),
    "shard_param_on_dim_0": ("True", "False"),
    "disable_reshard_on_root": ("False",),
    "tensor_parallel_size": ("2",),
    "plan": ("{}", "{'head': 'rowwise_split_input'}"),
    "parallelize_fn": (
        "lambda module, mesh: torch.distributed.tensor.parallel.parallelize_module(module, mesh, {'head': "
        "torch.distributed.tensor.parallel.RowwiseParallel(input_layouts=torch.distributed.tensor.Replicate())})",
    ),
    "check_batches": ("False",),
    "prefetch_bucket_size": ("0", "100"),
    "max_live_parameters": ("100",),
    "max_reuse_distance": ("0", "100"),
}
GIVEN = {
    "device_mesh": "device_mesh=torch.distributed.init_device_mesh('cpu', (int(os.environ['WORLD_SIZE']),))",
    "ignored_modules": "ignored_modules=[model.head]",
    "ignored_states": "ignored_states=[model.head.bias]",
}
"""Options that are given objects in place of sizes and names: torch's mesh, and parts of a model made before."""
_NEEDS_PRESET = dict.fromkeys(
    (
        *("sub_group_size", "param_persistence_threshold"),
        *("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"),
    ),
    ("stage", 3),
)
"""Options that act under some names of an engine alone, and do nothing under its others."""
APART = {
    "reduce_scatter": "contiguous_gradients",
    "device_mesh": "sharding_strategy",
    "reshard_after_forward": "sharding_strategy",
    "auto_wrap_policy": "unit_bytes",
    "activation_checkpointing_policy": "activation_checkpointing",
    "parallelize_fn": "plan",
}
"""Options that a strategy refuses beside another."""
SQUARE = {"tensor_parallel_size": "tensor_parallel_size=2", "device_mesh": "device_mesh=('auto', 2)"}
"""What makes two dimensions of an even number of ranks above two, with two in the inner one: models have two heads."""
_IDLE = {"stage=0": ("contiguous_gradients", "overlap_comm", "reduce_bucket_size", "reduce_scatter")}
"""Options that do nothing, and are refused, beside a value of another."""
_REFUSED_BESIDE = {
    "reduce_bucket_size": {"activation_offload"},
    "tensor_parallel_size": {
        *("activation_offload", "auto_wrap_policy", "backward_prefetch", "cpu_offload", "forward_prefetch"),
        *("ignored_modules", "ignored_states", "mixed_precision"),
    },
}
"""Options that every strategy refuses that has another one, as not there yet."""
KINDS = (
    *("sgd", "momentum", "nesterov", "adam", "adamw", "amsgrad", "rmsprop", "adagrad"),
    *("nadam", "radam", "adamax", "asgd", "adadelta", "adafactor"),
)
"""The kinds of optimizers that take all parameters."""
TAKES = {"muon": "matrices"}
"""Those that take some parameters only, and which; another optimizer takes the rest."""
WHOLE = ("adafactor", "muon")
"""Those that look at whole tensors."""
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true")
"""The precisions; "16-true" overflows in plain PyTorch, too."""
EXACT = ("32-true", "64-true")
"""Those that round nothing to 16 bits."""
CAST = ("64-true", "bf16-true")
"""Those that cast parameters."""
MADE_WHOLE = ("adagrad", "nadam", "asgd")
"""Optimizers with numbers of their own dtype beside parameters, which torch casts with these when it loads them."""
SPARSE = ("sgd", "adagrad")
"""Those that step sparse gradients, without weight decay and not fused; SGD's momentum would be sparse, too."""
BEGINNINGS = ("barrier()", "all_reduce(torch.ones(2))", "broadcast(3)", "reduce(torch.ones(2))")
"""Calls that set the environment up themselves, where a program has not."""
COMPILED = ("before", "in place", "after")
"""Where models are compiled: before setup by ``torch.compile(model)`` or ``model.compile()``, or after it by this."""
NOT_COMPILED = ("counter", "rewritten")
"""Parts that torch's compiler gets wrong."""
NOT_COMPLEX = ("adafactor",)
"""Optimizers that step real parameters alone."""
REAL_ALONE = ("deepspeed", "xla")
"""What the names of strategies begin with under which complex parameters are refused, or were never seen."""
FUSED = ("sgd", "momentum", "nesterov", "adam", "adamw", "amsgrad", "adagrad")
"""Those that torch can compute in one kernel on the CPU."""
ALL_AT_ONCE = ("momentum", "nesterov")
"""Those whose fused kernel wants momentum of all parameters with gradients, or of none yet."""

LEFT_OUT = (
    "a backward with a denominator after one without it in the same step, or after gradients were clipped or kept",
    "gradients zeroed by hand, and not set to None, where some are yet to be divided or unscaled: a loss without slope "
    "leaves zeros, too",
    "a batch without rows, unless the loss is a sum with a denominator",
    "a denominator while a part is left out of the optimizer, or after it was added, until gradients are zeroed",
    "gradients clipped by torch's function where they are yet to be divided or unscaled, and have another norm, or "
    "where it cannot add up norms: of shards and whole tensors, or where ranks share layers",
    "a closure where two optimizers share a module, or while gradients are deferred",
    "a closure, or a backward between clipping and zeroed gradients, where torch's gradient scaler allows neither",
    "Adafactor of a parameter without elements, by whose number torch divides",
    "Adagrad, NAdam and ASGD in 64-true and bf16-true: torch casts what they count in one number when it loads it",
    "fused SGD of bfloat16 parameters, which torch 2.13 computes wrong on the CPU",
    "fused SGD with momentum where some parameters have their first gradient after others, or their momentum is "
    "forgotten: torch 2.13's kernel ends in a TypeError",
    "a compiled model with a buffer that its forward both changes and computes with: torch 2.13 computes its gradients "
    "with what the buffer was changed to once more",
    "load_state_dict(assign=True), after which torch's optimizers step what no module has",
    "weights that a layer writes once more where it is computed again, compiled: torch's compiler leaves that out",
    "two backwards through one graph of a compiled model, which torch's compiler refuses",
    "a state dict loaded into what torch.compile returned, where torch prefixes all names",
    "averages of weights, and losses over all ranks' outputs, in 16 bits: how those add up is the engine's",
    "a part left out of an optimizer, or a module without one, under torch's gradient scaler, which unscales what an "
    "optimizer has",
    "a denominator where a module has no optimizer",
    "a layer frozen between its forward and its backward where this computes activations again: torch's checkpoint "
    "says that other tensors were saved",
    "ignored_modules=[torch.nn.Linear] of a model that has no others, of which nothing would be sharded",
    "parameters assigned other data where DeepSpeed's stage 3 has them away, which nothing can see: its page says so",
    "LBFGS, which evaluates its closure as often as the loss of one rank says; SparseAdam, which steps sparse "
    "gradients alone; Rprop, which steps by the sign of a gradient, be it rounding",
    "``loss.backward()`` under torch's gradient scaler, which has to multiply the loss",
    "gradient penalties in 16 bits, of compiled models, and of attention: torch's kernel for the CPU has no second "
    "derivative",
    "a part that writes to its weight in forward, where two forwards come before a backward, which autograd refuses, "
    "where its average is evaluated, and in bf16-true",
    "a part that writes in forward through a parameter's data, which torch does not count: fsdp looks for that in the "
    "first forward of each part, and xla_fsdp never, as their pages say, for which none assigns other data either",
    "what optimizers hold changed through its data after a method that no backward has followed, which torch counts "
    "nowhere; and weights changed after an exception has ended a forward that writes to them, unless a module that is "
    "not compiled was asked for its parameters: fsdp's page says so",
    "values drawn anew by torch.nn.init in bf16-true, whose dtype is the engine's, on devices other than the CPU, and "
    "of models whose parameters are not laid out by rows: torch draws in the order of memory, which engines set",
    "gradients changed by a function of lists where some have no elements, or are of parameters that fsdp keeps whole: "
    "torch's take plain tensors or DTensors, and not both",
    "hooks on accumulated gradients, which see each rank's own",
    "hooks from after setup where devices are not CPUs: xla_fsdp refuses them, as its page says",
    "weights read by a layer around the units that they belong to, before these run",
    "a step with gradients that were made infinite: all that follows would be no number",
    "clipping, a gradient scaler, weight decay, fused kernels and all optimizers but SGD without momentum and Adagrad "
    "where gradients are sparse: torch has no kernels for most of that",
    "sparse gradients changed through their data, which torch copies first",
    "complex parameters in other precisions than 32-true, compiled, clipped by value, or squared in a loss: torch has "
    "no kernels for most of that, and casts them to real ones",
    "precision 16-true, and on devices other than the CPU all but 32-true",
    "gradients set to zeros after a backward inside no_backward_sync, before one outside, which the contract refuses "
    "as it does steps, clipping and looking at gradients there: those are tried",
    "steps, clipping and looking at gradients between a backward past the strategy that an exception has ended and the "
    "next backward, which begins the step anew",
    "a fused optimizer made after setup, where torch has no fused kernels for the device: its constructor says so",
    "dropout between layers that ranks split, where each draws a mask for its own part",
    "tensor-parallel strategies before or after a switch, which change the number of data ranks",
    "what a strategy's card does not promise: that it is refused by name is a promise of the kit",
    "the same strategy's object set up again where it was given parts of a model, or with several models: they have "
    "none of these parts",
    "the options that are listed below by strategy: they do not change how it computes, or change what",
    "no_backward_sync inside no_backward_sync, and gradients zeroed inside it",
    "closures that compute more than a loss and its gradients, and schedulers other than StepLR",
    "a part left out of Adagrad, which torch 2.9 gives no state for groups of later",
    "modules loaded without the rest under a gradient scaler, or all while gradients wait, which have another factor",
    "a denominator beside an output's gradient, a loss over all ranks' outputs, a penalty, ``loss.backward()`` or a "
    "backward that an exception ends",
    "losses over all ranks' outputs where ranks have batches of other sizes, and then batches of one row of BatchNorm",
    "checkpoints from before the number of ranks was changed",
    "infinite gradients, and those that optimizers zero after a forward, where two optimizers share a module or one "
    "lacks a part",
    "more than two models, and more than two optimizers",
    "a backward past the strategy that an exception ends, where models are compiled: fsdp's next one finds nothing "
    "where the compiler has kept its weights",
    "a block that only one rank runs, where models are compiled: ranks cannot compare inside what the compiler runs",
)
"""What plain PyTorch allows or would allow, and programs never do."""
LEFT_OPEN = (
    "what is held after teardown: a layer with parametrizations by its class, which fully_shard holds, and modules on "
    "XLA devices by torch_xla's hooks of a forward without a backward",
    "whether rank 0's buffers are sent to all before a forward: as its option broadcast_buffers says",
    "which dtype is where in a precision: as the table on its card says",
    "the generators of data ranks after a load on another number of ranks: all must be apart",
    "gradients of a loss that was multiplied by too much, which no step takes",
    "which masks a device draws that has a generator of its own: each keeps its share, none is drawn again until "
    "generators are seeded or restored, data ranks draw different ones, and all else is what these masks make of it",
    "by what data ranks above the first are seeded: derived from the seed and the rank, alike under every strategy",
    "rounding: the bounds in shard_core/testing/programs/plain/comparison.py",
)
"""What a strategy may define for itself, so that plain PyTorch takes it from there; all else must be the same."""


def runs_alone(program: Program, how: str) -> bool:
    """Return whether one rank alone may run a block in a program's backward of some kind."""
    return how != "contrastive" and not program.compiled


def offered(strategy: str) -> list[str]:
    """List the options of ``OPTIONS`` that a strategy has and that its name leaves open, as ``name=value``.

    Example:
        >>> offered("ddp")[0]
        'activation_checkpointing=torch.nn.Linear'
    """
    card = plugins.find(strategy)
    free = {option.name for option in card.options} - card.presets.keys()
    free -= {name for name, (preset, value) in _NEEDS_PRESET.items() if card.presets.get(preset) != value}
    free -= {name for option in card.options for name in _REFUSED_BESIDE.get(option.name, ())}
    free -= {name for pair in APART.items() for name in pair if not card.presets.keys().isdisjoint(pair)}
    free |= {name for name, value in card.presets.items() if isinstance(value, tuple) and "auto" in value}  # a default
    drawn = [(name, value) for name, values in OPTIONS.items() if name in free for value in values]
    # XLA's wrapper has nothing to do with the objects of torch's.
    torchs = "cpu" in card.devices
    return [f"{name}={value}" for name, value in drawn if torchs or not value.startswith("torch.distributed.")]


def not_drawn() -> dict[str, list[str]]:
    """List by strategy the options on its card that no program has, of those strategies that are installed."""
    cards = (each.info for each in plugins.installed() if each.info is not None)
    named = {card.name: {option.name for option in card.options} - card.presets.keys() for card in cards}
    elsewhere = {"compile", "find_unused_parameters"}  # which follow from a program's models, and how it compiles them
    return {name: sorted(options - OPTIONS.keys() - elsewhere) for name, options in named.items()}


def agreeing(options: Sequence[str]) -> tuple[str, ...]:
    """Pick from drawn options those that no strategy refuses beside another of them.

    Example:
        >>> agreeing(["unit_bytes=1", "auto_wrap_policy={torch.nn.Linear}", "stage=0", "overlap_comm=False"])
        ('unit_bytes=1', 'stage=0')
    """
    named = {option.partition("=")[0]: option for option in options}
    idle = {name for option in options for name in _IDLE.get(option, ())}
    return tuple(option for name, option in named.items() if APART.get(name) not in named and name not in idle)


def splits_layers(card: StrategyInfo) -> bool:
    """Return whether ranks may share layers under a strategy, whose sums they then add up in parts."""
    return any(option.name == "tensor_parallel_size" for option in card.options)


def is_made_before(program: Program) -> bool:
    """Return whether a program's model is made before its strategy, which is given parts of it."""
    return any("[model." in option for option in program.options)


def options_for(strategy: str, options: Sequence[str]) -> list[str]:
    """Pick from a program's options those that a strategy has: it may go on under one that has others."""
    known = offered(strategy)
    names = {option.partition("=")[0] for option in known}
    known += [option for each in (SQUARE, GIVEN) for name, option in each.items() if name in names]
    return [option for option in options if option in known]
