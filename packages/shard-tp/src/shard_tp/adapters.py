"""Layers with LoRA adapters of PEFT: how their parts are split when the layer is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shard_core import SetupError
from shard_core.backend import plain_module_name
from shard_tp.dropout import draw_apart

if TYPE_CHECKING:
    from shard_tp.plan import Style

_SPLITTING = (ColwiseParallel, RowwiseParallel)


def parts_of(name: str, module: nn.Module, style: Style) -> dict[str, Style]:
    """List what is split of a layer: itself or, of one with adapters, the parts it computes with.

    A layer that is split by its outputs has the second matrix of its adapters split alike, and the first one whole;
    one that is split by its inputs has the first one split.

    Args:
        name: The layer's name.
        module: The layer; recognised as one with adapters by its attributes.
        style: How it is to be split.

    Returns:
        Styles by the names of the parts.

    Raises:
        SetupError: If it has adapters that cannot be split.
    """
    children = dict(module.named_children())
    if not {"base_layer", "lora_A", "lora_B"} <= children.keys() or not isinstance(style, _SPLITTING):
        return {name: style}
    whole = children["base_layer"]
    others = [kind for kind in ("lora_embedding_A", "lora_magnitude_vector") if _count(children.get(kind))]
    if others or not isinstance(whole, nn.Linear):
        held = ", ".join(others) or "lora_A"
        raise SetupError(
            f"{plain_module_name(name)!r} is of type {type(whole).__name__} with {held}, which strategy 'tp' cannot "
            "split; it can split LoRA on Linear without use_dora, so take this layer out of target_modules, or out of "
            "the plan."
        )
    split = "lora_B" if isinstance(style, ColwiseParallel) else "lora_A"
    parts: dict[str, Style] = {f"{name}.base_layer": style}
    parts |= {f"{name}.{split}.{adapter}": style for adapter, _ in children[split].named_children()}
    if isinstance(style, RowwiseParallel) and any(isinstance(each, Shard) for each in style.input_layouts):
        dropouts = children["lora_dropout"].named_children()
        parts |= {f"{name}.lora_dropout.{adapter}": draw_apart for adapter, _ in dropouts}
    return parts


def _count(parts: nn.Module | None) -> int:
    """Return how many adapters have a part of one kind."""
    return 0 if parts is None else len({name for name, _ in parts.named_parameters()})
