"""Plans: which modules are split over tensor-parallel ranks, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shard_core import InvalidOption, SetupError
from shard_core.backend import ParameterNames, plain_module_name, plain_name
from shard_core.plugins import nearest
from shard_tp.adapters import parts_of
from shard_tp.dropout import draw_apart

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

#: What a style comes to: a style of torch, or a function of ours that splits one module over a mesh.
Style: TypeAlias = "ParallelStyle | Callable[[nn.Module, DeviceMesh], None]"


def replicate_over_heads(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a module whole whose input is split along the last dimension but one, such as a norm of each head.

    Each rank runs it on its own heads, so its gradient there is a part of the sum over all ranks; stated as
    a layout, torch adds the parts up.

    Args:
        module: Works along the last dimension of its first argument.
        mesh: The tensor-parallel ranks.
    """
    # torch annotates the second function as if it returned nothing; what it returns are the new inputs.
    distribute_module(module, mesh, _replicate, _with_split_heads, _local_output)  # type: ignore[arg-type]


def _replicate(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    del name
    for key, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _with_split_heads(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    del module
    first, *rest = inputs
    return DTensor.from_local(first, mesh, [Shard(first.dim() - 2)], run_check=False), *rest


def _local_output(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    del module, mesh
    return output.to_local()


#: What a plan may call a style: the names are those of Hugging Face's plans, the meaning is the same; ours is the last.
STYLES: Mapping[str, Callable[[], Style]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": lambda: replicate_over_heads,
    "split_dropout": lambda: draw_apart,
}

#: How torch's own transformer layers are split; their attention stays whole, its projections are one parameter.
_TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_TORCH_PLAN = {"linear1": "colwise", "dropout": "split_dropout", "linear2": "rowwise"}


def own_plan(module: nn.Module, ranks: int) -> dict[str, str]:
    """Find the plan that a module brings along, or that is known for the layers it is made of.

    Args:
        module: The user's module.
        ranks: How many tensor-parallel ranks there are.

    Returns:
        The plan of a ``transformers`` model's configuration; else one for torch's own transformer layers.

    Raises:
        SetupError: If there is none, if it has a style that is not there yet, or a model's heads do not divide.
    """
    config = getattr(module, "config", None)
    brought: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if brought:
        _check_known(module, brought)
        _check_heads(config, ranks)
        inside = _prefix(module, next(iter(brought)))
        return {f"{inside}{pattern}": style for pattern, style in brought.items()}
    layers = [name for name, part in module.named_modules() if isinstance(part, _TORCH_LAYERS)]
    found = {
        plain_module_name(f"{name}.{part}" if name else part): style
        for name in layers
        for part, style in _TORCH_PLAN.items()
    }
    if not found:
        raise SetupError(
            f"{type(module).__name__} has no tensor-parallel plan of its own; give plan={{'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise'} by its own names or parallelize_fn=, or plan={} to leave it whole on each of "
            f"the {ranks} tensor-parallel ranks."
        )
    return found


def apply_plan(module: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Split a module over tensor-parallel ranks, in place.

    Args:
        module: The user's module.
        plan: Names of submodules, ``*`` for any one part of a name, to styles by name or object. Where
            two match, the first one counts.
        mesh: The tensor-parallel ranks, one axis.

    Raises:
        InvalidOption: If a name matches nothing, a style is unknown, or nothing takes what a layer splits.
        SetupError: If a module or its size does not fit its style, or tied parameters would part.
    """
    check_styles(plan)
    chosen = _chosen(module, plan)
    if mesh.size() == 1:
        return  # nothing to split, but a plan with a slip in it is reported
    for name, style in chosen.items():
        _check_fits(name, module.get_submodule(name), style, mesh.size())

    def split() -> None:
        for name, style in chosen.items():
            part = module.get_submodule(name)
            if isinstance(style, ParallelStyle):
                parallelize_module(part, mesh, style, src_data_rank=None)
            else:
                style(part, mesh)

    split_by(split, module, mesh)


def check_styles(plan: Mapping[str, Any]) -> None:
    """Refuse a plan that no module could follow.

    Args:
        plan: Names of submodules to styles by name or object.

    Raises:
        InvalidOption: If a style is unknown, or nothing takes what a layer splits.
    """
    for pattern, asked in plan.items():
        if not isinstance(asked, ParallelStyle) and (not isinstance(asked, str) or asked not in STYLES):
            raise InvalidOption(
                f"plan gives {pattern!r} the style {asked!r}{nearest(str(asked), STYLES)}; a style is one of "
                f"{', '.join(STYLES)}, or a ParallelStyle of torch."
            )
    splitting = [pattern for pattern, asked in plan.items() if asked == "colwise"]
    # A style that is an object may take what is split in a way of its own.
    if splitting and not any(asked == "rowwise" or isinstance(asked, ParallelStyle) for asked in plan.values()):
        raise InvalidOption(
            f"plan gives {splitting[0]!r} the style 'colwise', so each rank gets a part of its output, and no module "
            "is 'rowwise' to take it; give the layer that follows 'rowwise', or this one 'colwise_gather_output'."
        )


def split_by(split: Callable[[], Any], module: nn.Module, mesh: DeviceMesh) -> None:
    """Split a module by any means; tied parameters stay one and frozen ones frozen.

    Args:
        split: Exchanges parameters of the module for parts of them.
        module: The user's module.
        mesh: The tensor-parallel ranks, one axis.

    Raises:
        SetupError: If a size does not divide over the ranks, or parameters that were tied would be laid out
            differently.
    """
    before = ParameterNames(module)
    trained = {name: each.requires_grad for name, each in module.named_parameters(remove_duplicate=False)}
    split()
    for name, parameter in module.named_parameters():
        for dim in _split_dims(parameter, mesh):
            _check_divides(name, parameter, dim, mesh.size())
        parameter.requires_grad_(trained[name])
    for names in before.ties:
        now = [module.get_parameter(name) for name in names]
        if len({_layout(parameter) for parameter in now}) > 1:
            raise SetupError(
                f"{' and '.join(map(repr, names))} are one parameter and would be split differently; give their "
                "modules styles that split it alike, or none."
            )
        for name in names[1:]:
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner).register_parameter(key, now[0])


def _chosen(module: nn.Module, plan: Mapping[str, Any]) -> dict[str, Style]:
    """List the submodules a plan means, each with its style."""
    chosen: dict[str, Style] = {}
    names = {plain_module_name(name): name for name, _ in module.named_modules() if name}  # of a wrapper, what it wraps
    for pattern, asked in plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matched = [name for plain, name in names.items() if wanted.fullmatch(plain)]
        if not matched:
            raise InvalidOption(f"plan names {pattern!r}, which no submodule matches{nearest(pattern, names)}.")
        for name in matched:
            part = module.get_submodule(name)
            for split, style in parts_of(name, part, _style(asked, part)).items():
                chosen.setdefault(split, style)
    return chosen


def _prefix(module: nn.Module, pattern: str) -> str:
    """Return what stands before a plan's names in a module, which others may have wrapped."""
    wanted = re.compile(r"((?:.+\.)?)" + re.escape(pattern).replace(r"\*", r"[^.]+"))
    matches = (wanted.fullmatch(plain_module_name(name)) for name, _ in module.named_modules())
    return min((match[1] for match in matches if match), key=len, default="")


def _style(asked: str | ParallelStyle, module: nn.Module) -> Style:
    if isinstance(asked, ParallelStyle):
        return asked
    if asked == "rowwise" and isinstance(module, nn.Embedding):
        # What comes in are not activations that a colwise layer has split, but whole tokens.
        asked = "rowwise_split_input"
    return STYLES[asked]()


def _check_known(module: nn.Module, brought: Mapping[str, str]) -> None:
    """Refuse a plan whose author knows more styles than we do, as those for mixtures of experts."""
    unknown = {pattern: style for pattern, style in brought.items() if style not in STYLES}
    if unknown:
        pattern, style = next(iter(unknown.items()))
        raise SetupError(
            f"the plan that {type(module).__name__} brings along gives {pattern!r} the style {style!r}, which strategy "
            f"'tp' does not know; give plan= with the modules that are to be split, by {', '.join(STYLES)}, or "
            "parallelize_fn=."
        )


def _check_heads(config: Any, ranks: int) -> None:
    for count in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, count, None)
        if heads is not None and heads % ranks:
            raise SetupError(f"{count}={heads} does not divide over tensor_parallel_size={ranks}.")


def _check_fits(name: str, module: nn.Module, style: Style, ranks: int) -> None:
    """Refuse before anything is split what torch would refuse halfway, or train wrong."""
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise SetupError(
            f"{plain_module_name(name)!r} is of type {type(module).__name__}, which torch cannot split by columns or "
            "rows; it can split Linear and Embedding, so leave it out of the plan, or split it with parallelize_fn=."
        )
    # An embedding's weight lies the other way round: its columns are what comes out.
    by_output = isinstance(style, ColwiseParallel)
    _check_divides(f"{name}.weight", module.weight, int(by_output == isinstance(module, nn.Embedding)), ranks)


def _check_divides(name: str, parameter: torch.Tensor, dim: int, ranks: int) -> None:
    if parameter.shape[dim] % ranks:
        what = ("rows", "columns")[dim] if dim < 2 else f"places in dimension {dim}"
        raise SetupError(
            f"{plain_name(name)} has {parameter.shape[dim]} {what}, which do not divide over "
            f"tensor_parallel_size={ranks}; leave its module whole, or change its size."
        )


def _split_dims(parameter: nn.Parameter, mesh: DeviceMesh) -> list[int]:
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
        return []
    return [placement.dim for placement in parameter.placements if isinstance(placement, Shard)]


def _layout(parameter: nn.Parameter) -> object:
    return parameter.placements if isinstance(parameter, DTensor) else None
