"""The loops of all sections: ours, and the one people write by hand on the same engine and layout; and a Llama."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from cases import Machine, Skipped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shard_core import get_strategy
from shard_core.backend import find_blocks, find_units

CLIP, UNIT_BYTES = 1.0, 64 * 2**20
#: The kernel is named, so that neither loop chooses one.
adamw = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)


@contextlib.contextmanager
def started(name: str, machine: Machine, **options: Any) -> Iterator[Any]:
    """Start a strategy in a world of one, over NCCL on a GPU; free what was held in it at the end."""
    options |= {"tensor_parallel_size": 1} if name == "tp" else {}
    strategy = get_strategy(name, accelerator=machine.device, devices=1, **options)
    strategy.setup_environment()
    try:
        yield strategy
    finally:
        strategy.teardown()
        free(machine)


def free(machine: Machine) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if machine.device == "cuda":
        torch.cuda.empty_cache()


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = getattr(output, "loss", output)
    return loss if loss.dim() == 0 else loss.square().mean()


class Ours:
    """The loop of the README."""

    def __init__(self, strategy: Any, model: nn.Module, make: Callable[..., Any], *, clip: bool = False) -> None:
        self.strategy, self.clip = strategy, clip
        self.model, (self.optimizer,) = strategy.setup_module_and_optimizers(model, [make(model.parameters())])

    def step(self, *args: Any, denominator: Any = None, **kwargs: Any) -> torch.Tensor:
        """Take a step and return its loss, without waiting for it."""
        loss = _loss(self.model(*args, **kwargs))
        self.strategy.backward(loss, self.model, denominator=denominator)
        if self.clip:
            self.strategy.clip_gradients_norm(self.model, self.optimizer, CLIP)
        self.strategy.optimizer_step(self.optimizer)
        self.optimizer.zero_grad()
        return loss.detach()


class Raw:
    """The loop by hand, on torch's own words."""

    def __init__(self, model: nn.Module, make: Callable[..., Any], *, clip: bool = False) -> None:
        self.model, self.optimizer, self.clip = model, make(model.parameters()), clip
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.scaler: torch.amp.GradScaler | None = None

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a step and return its loss, without waiting for it."""
        with self.context():
            loss = _loss(self.model(*args, **kwargs))
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, error_if_nonfinite=True)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def sharded(model: nn.Module, units: Sequence[Sequence[nn.Module]], machine: Machine, *, offload: bool) -> nn.Module:
    """Shard a model by hand, unit by unit."""
    policy = CPUOffloadPolicy(pin_memory=machine.device == "cuda") if offload else OffloadPolicy()
    shard: Any = functools.partial(fully_shard, mesh=init_device_mesh(machine.device, (1,)), offload_policy=policy)
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

    def options(self) -> dict[str, Any]:
        """Return the strategy's arguments."""
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        options: dict[str, Any] = {"precision": self.precision}
        options |= {"unit_bytes": self.unit_bytes} if self.strategy != "ddp" else {}
        options |= {"activation_checkpointing": LlamaDecoderLayer} if self.recomputed else {}
        return options | ({"compile": True} if self.compiled else {})

    def check(self) -> None:
        """Skip where transformers lacks, or what compiling needs."""
        if importlib.util.find_spec("transformers") is None:
            raise Skipped("transformers is not installed")
        if self.compiled and not (shutil.which("gcc") or shutil.which("cc")):
            raise Skipped("there is no C compiler for torch.compile")

    def ours(self, strategy: Any, size: Size, machine: Machine) -> Ours:
        """Build our loop of a Llama."""
        return Ours(strategy, llama(size, machine), adamw, clip=self.clip)

    def raw(self, size: Size, machine: Machine) -> Raw:
        """Build the loop of the same Llama by hand."""
        model = llama(size, machine)
        if self.precision == "bf16-true":
            model.to(torch.bfloat16)
        for block in find_blocks(model):
            if self.recomputed:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            if self.compiled:
                block.compile()
        if self.strategy == "ddp":
            index = [torch.cuda.current_device()] if machine.device == "cuda" else None
            model = DistributedDataParallel(model, device_ids=index, gradient_as_bucket_view=True)
        else:
            units = [each.modules for each in find_units(model, self.unit_bytes)]
            model = sharded(model, units, machine, offload=self.strategy == "fsdp_cpu_offload")
        loop = Raw(model, adamw, clip=self.clip)
        if self.precision == "bf16-mixed":
            loop.context = functools.partial(torch.autocast, machine.device, torch.bfloat16)
        return loop


def llama(size: Size, machine: Machine) -> nn.Module:
    """Build a Llama of random weights on its device, the same at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
        "max_position_embeddings": size.sequence,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    torch.manual_seed(0)
    with torch.device(machine.device):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**settings))
    return model.float()


def tokens(size: Size, machine: Machine) -> dict[str, Any]:
    """Draw the one batch of all steps."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(size.vocabulary, (size.batch, size.sequence), generator=generator).to(machine.device)
    return {"input_ids": drawn, "labels": drawn}
