"""Hugging Face models with LoRA adapters of PEFT, and how plain PyTorch trains them in one process."""

from collections.abc import Callable
from typing import Any

import hugging_face
import peft
import torch

from shard_core import Strategy

STEPS, BATCH = 3, 12
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def lora(**options: Any) -> peft.LoraConfig:
    """Return the adapters' configuration: both of their matrices random, so that both learn from the first step."""
    return peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **{"init_lora_weights": False, **options})


def make(case: str) -> Any:
    """Build a model with adapters, from torch's current seed.

    Args:
        case: ``"wrapped"`` by PEFT, ``"injected"`` into a model of transformers, ``"tied"`` with the head's weights
            beside adapters and a layer trained as a whole, or with a base in ``"bf16"`` that is checkpointed.
    """
    if case == "injected":
        injected: Any = hugging_face.make("llama")
        injected.add_adapter(lora(target_modules=["q_proj", "v_proj"]))
        return injected
    if case == "tied":
        wanted = lora(target_modules=["c_attn", "wte"], modules_to_save=["ln_f"], fan_in_fan_out=True, bias="lora_only")
        return peft.get_peft_model(hugging_face.make("gpt2"), wanted)
    base: Any = hugging_face.make("llama")
    if case == "bf16":
        base.to(torch.bfloat16).gradient_checkpointing_enable()
        base.enable_input_require_grads()
    return peft.get_peft_model(base, lora(target_modules=["q_proj", "o_proj", "down_proj"], use_dora=case == "dora"))


def chosen(model: torch.nn.Module, every: bool) -> list[torch.nn.Parameter]:
    """Return what the optimizer is given: all parameters, as PEFT's own examples do, or those that are trained."""
    return [each for each in model.parameters() if every or each.requires_grad]


def train(
    model: Any, optimizer: torch.optim.Optimizer, strategy: Strategy | None, case: str, steps: int = STEPS, at: int = 0
) -> tuple[list[float], list[float]]:
    """Train, under a strategy or without one; return the losses and the norms of gradients."""
    losses, norms = [], []
    for batch in hugging_face.batches("gpt2" if case == "tied" else "llama", at + steps, BATCH)[at:]:
        if strategy is None:
            loss = model(**batch).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            rank, size = (strategy.distributed_sampler_kwargs[key] for key in ("rank", "num_replicas"))
            loss = model(**{key: value.chunk(size)[rank].to(strategy.root_device) for key, value in batch.items()}).loss
            strategy.backward(loss, model)
            norm = strategy.clip_gradients_norm(model, optimizer, 1.0)
            strategy.optimizer_step(optimizer)
            loss = strategy.all_reduce(loss.detach())
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


def plain(case: str, optimizer: str, every: bool = False) -> tuple[Any, list[float], list[float]]:
    """Build and train as one would without Shard."""
    torch.manual_seed(11)
    model = make(case)
    return model, *train(model, OPTIMIZERS[optimizer](chosen(model, every)), None, case)


def set_up(strategy: Strategy, case: str, optimizer: str, every: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    """Build the same model under a strategy."""
    strategy.seed_everything(11)
    with strategy.module_init_context():
        model = make(case)
    model, (made,) = strategy.setup_module_and_optimizers(model, [OPTIMIZERS[optimizer](chosen(model, every))])
    return model, made
