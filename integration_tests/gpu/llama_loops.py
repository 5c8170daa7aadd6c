"""A Llama and the loops that train it: ours, and those people write by hand on the same engine and layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from cases import Machine, Skipped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shard_core.backend import find_blocks, find_units

RATE, CLIP, UNIT_BYTES = 1e-4, 1.0, 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Size:
    """A Llama's measures, and the tokens of a step."""

    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.sequence * self.batch


BILLION = Size(2048, 5632, 22, 32, 4, 32000, 2048, 2)
SMALL = Size(768, 2048, 12, 12, 12, 32000, 512, 2)  # several blocks make 64 MiB here
TINY = Size(64, 128, 2, 4, 2, 256, 32, 2)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a pair of loops has in common.

    Attributes:
        strategy: Ours, by name.
        precision: Of both loops: ``"bf16-mixed"``, ``"bf16-true"`` and so on.
        unit_bytes: How the blocks are joined where parameters are sharded; 1 makes a unit of each.
        recomputed: Whether the blocks' activations are checkpointed.
        compiled: Whether the blocks are compiled.
        clip: Whether gradients are clipped, with the check for non-finite ones that both have.
        options: Further options of ours.
    """

    strategy: str
    precision: str = "bf16-mixed"
    unit_bytes: int = UNIT_BYTES
    recomputed: bool = False
    compiled: bool = False
    clip: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def strategy_options(self) -> dict[str, Any]:
        """Return the arguments of ``get_strategy`` beside the name, the device and their number."""
        options = dict(self.options) | {"precision": self.precision}
        if self.strategy != "ddp":
            options["unit_bytes"] = self.unit_bytes
        if self.recomputed:
            options["activation_checkpointing"] = layer_class()
        if self.compiled:
            options["compile"] = True
        return options


def layer_class() -> type[nn.Module]:
    """Import the class of a Llama's blocks."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return LlamaDecoderLayer


def need_llama(kind: Kind) -> None:
    """Skip where transformers lacks, or what compiling needs."""
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    if kind.compiled and not (shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        raise Skipped("there is no C compiler for torch.compile")


def llama(size: Size, device: str) -> nn.Module:
    """Build a Llama of random weights on its device, the same at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        max_position_embeddings=size.sequence,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config)
    return model.float()


def tokens(size: Size, device: str) -> torch.Tensor:
    """Draw the one batch of all steps."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(size.vocabulary, (size.batch, size.sequence), generator=generator).to(device)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of both loops; its kernel is named, so that neither chooses."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


class Ours:
    """The loop of the README."""

    def __init__(self, strategy: Any, model: nn.Module, kind: Kind) -> None:
        self.strategy, self.kind = strategy, kind
        optimizer = adamw(model)
        self.model, (self.optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])

    def step(self, batch: torch.Tensor, **backward: Any) -> torch.Tensor:
        """Take a step and return its loss, without waiting for it."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.strategy.backward(loss, self.model, **backward)
        if self.kind.clip:
            self.strategy.clip_gradients_norm(self.model, self.optimizer, CLIP)
        self.strategy.optimizer_step(self.optimizer)
        self.optimizer.zero_grad()
        return loss.detach()


class Raw:
    """The loop by hand, on torch's own words."""

    def __init__(self, model: nn.Module, kind: Kind, device: str) -> None:
        self.kind = kind
        if kind.precision == "bf16-true":
            model.to(torch.bfloat16)
        for block in find_blocks(model):
            if kind.recomputed:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
            if kind.compiled:
                block.compile()
        self.model = _wrapped(model, kind, device)
        self.optimizer = adamw(self.model)
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if kind.precision == "bf16-mixed":
            self.context = functools.partial(torch.autocast, device, torch.bfloat16)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Take a step and return its loss, without waiting for it."""
        with self.context():
            loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        if self.kind.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _wrapped(model: nn.Module, kind: Kind, device: str) -> nn.Module:
    if kind.strategy == "ddp":
        index = [torch.cuda.current_device()] if device == "cuda" else None
        return DistributedDataParallel(model, device_ids=index, gradient_as_bucket_view=True)
    offloads = kind.strategy == "fsdp_cpu_offload"
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if offloads else OffloadPolicy()
    shard: Any = functools.partial(fully_shard, mesh=init_device_mesh(device, (1,)), offload_policy=offload)
    for unit in find_units(model, kind.unit_bytes):
        shard(list(unit.modules))
    shard(model)
    return model
