"""A Llama of random weights and the two loops that train it on the same engine and layout: ours, and one by hand."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
from collections.abc import Sequence
from typing import Any

import torch
from loops import Ours, Raw
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shard_core.backend import find_blocks, find_units

UNIT_BYTES = 64 * 2**20
#: The kernel is named, so that neither loop chooses one.
adamw = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)


def sharded(model: nn.Module, units: Sequence[Sequence[nn.Module]], device: str, *, offload: bool) -> nn.Module:
    """Shard a model by hand, unit by unit, over the one rank there is."""
    policy = CPUOffloadPolicy(pin_memory=device == "cuda") if offload else OffloadPolicy()
    shard: Any = functools.partial(fully_shard, mesh=init_device_mesh(device, (1,)), offload_policy=policy)
    for unit in units:
        shard(list(unit))
    shard(model)
    return model


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

    def model(self, device: Any) -> nn.Module:
        """Build a Llama of random weights on a device, the same at each call."""
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"hidden_size": self.width, "intermediate_size": self.inner, "num_hidden_layers": self.layers}
        shape |= {"num_attention_heads": self.heads, "num_key_value_heads": self.key_heads}
        shape |= {"vocab_size": self.vocabulary, "max_position_embeddings": self.sequence}
        torch.manual_seed(0)
        with torch.device(device):
            model: nn.Module = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa", use_cache=False))
        return model.float()

    def tokens(self, device: Any) -> dict[str, torch.Tensor]:
        """Draw the one batch of all steps."""
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(self.vocabulary, (self.batch, self.sequence), generator=generator).to(device)
        return {"input_ids": drawn, "labels": drawn}


BILLION = Size(2048, 5632, 22, 32, 4, 32000, 2048, 8)
SMALL = Size(768, 2048, 12, 12, 12, 32000, 512, 2)  # several blocks make 64 MiB here
TINY = Size(64, 128, 2, 4, 2, 256, 32, 2)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a pair of loops has in common: ``unit_bytes=1`` makes a unit of each block."""

    strategy: str
    precision: str = "bf16-mixed"
    unit_bytes: int = UNIT_BYTES
    recomputed: bool = False
    compiled: bool = False
    clip: bool = False

    @property
    def lacks(self) -> str:
        """Return what it needs and does not find here; ``""`` for nothing."""
        if importlib.util.find_spec("transformers") is None:
            return "transformers is not installed"
        compiler = shutil.which("gcc") or shutil.which("cc")
        return "there is no C compiler for torch.compile" if self.compiled and not compiler else ""

    def options(self) -> dict[str, Any]:
        """Return the strategy's arguments."""
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        options: dict[str, Any] = {"precision": self.precision, **({"compile": True} if self.compiled else {})}
        options |= {"unit_bytes": self.unit_bytes} if self.strategy != "ddp" else {}
        return options | ({"activation_checkpointing": LlamaDecoderLayer} if self.recomputed else {})

    def ours(self, strategy: Any, size: Size) -> Ours:
        """Build our loop of a Llama."""
        return Ours(strategy, size.model(strategy.root_device), adamw, clip=self.clip)

    def raw(self, size: Size, device: str) -> Raw:
        """Build the loop of the same Llama by hand."""
        model = size.model(device)
        if self.precision == "bf16-true":
            model.to(torch.bfloat16)
        for block in find_blocks(model):
            if self.recomputed:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            if self.compiled:
                block.compile()
        if self.strategy == "ddp":
            index = [torch.cuda.current_device()] if device == "cuda" else None
            model = DistributedDataParallel(model, device_ids=index, gradient_as_bucket_view=True)
        else:
            units = [each.modules for each in find_units(model, self.unit_bytes)]
            model = sharded(model, units, device, offload=self.strategy == "fsdp_cpu_offload")
        loop = Raw(model, adamw, clip=self.clip)
        if self.precision == "bf16-mixed":
            loop.context = functools.partial(torch.autocast, device, torch.bfloat16)
        return loop
