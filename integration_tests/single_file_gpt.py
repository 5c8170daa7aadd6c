"""A whole training run in one file, as people write theirs: what it trains under is chosen by whoever starts it.

Model, batches, accumulation, clipping, schedule, evaluation and checkpoints are the script's own; the strategy, and its
options, come from outside.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from shard_core import get_strategy

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 64, 16, 32, 4, 2
SEED, RATE, LEAST_RATE, WARM_UP, DECAY = 1234, 5e-3, 5e-4, 2, 0.1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.outputs = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        queries, keys, values = self.inputs(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.outputs(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def make_optimizer(model):
    """Decay matrices and nothing else."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def rate_at(step, steps):
    """Warm up, then fall along a cosine."""
    if step < WARM_UP:
        return RATE * (step + 1) / (WARM_UP + 1)
    return LEAST_RATE + (RATE - LEAST_RATE) * (1 + math.cos(math.pi * (step - WARM_UP) / (steps - WARM_UP))) / 2


def get_batch(split, number, size):
    """Cut windows at random out of a text that a rule has made; the same of a number on every rank."""
    text = torch.arange(4096) ** 2 % 61 + (split == "held out")
    generator = torch.Generator().manual_seed(hash((split == "held out", number)) % 2**31)
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=generator).tolist()
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def train(strategy, args):
    place = strategy.distributed_sampler_kwargs

    def my_batch(split, number):
        parts = get_batch(split, number, args.batch)
        return strategy.batch_to_device(tuple(part[place["rank"] :: place["num_replicas"]] for part in parts))

    @torch.no_grad()
    def evaluate():
        model.eval()
        found = {}
        for split in ("trained on", "held out"):
            losses = torch.stack([model(*my_batch(split, -1 - number))[1] for number in range(2)])
            found[split] = strategy.all_reduce(losses.mean()).item()
        model.train()
        return found

    strategy.seed_everything(SEED)
    with strategy.module_init_context():
        model = GPT()
    optimizer = make_optimizer(model)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    state = {"model": model, "optimizer": optimizer, "step": 0, "best": math.inf}
    if args.resume:
        strategy.load_checkpoint(args.out / "last", state)

    losses, norms, evaluations = [], [], []
    while state["step"] < args.stop:
        step = state["step"]
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args.steps)
        if step % args.evaluate_every == 0:
            evaluations.append(evaluate())
            if evaluations[-1]["held out"] < state["best"]:
                state["best"] = evaluations[-1]["held out"]
                strategy.save_checkpoint(args.out / "best", state)
        total = 0.0
        for micro in range(args.accumulate):
            with strategy.no_backward_sync(model, enabled=micro < args.accumulate - 1):
                _, loss = model(*my_batch("trained on", step * args.accumulate + micro))
                loss = loss / args.accumulate
                strategy.backward(loss, model)
            total += loss.detach()
        norms.append(float(strategy.clip_gradients_norm(model, optimizer, 1.0)))
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        losses.append(strategy.all_reduce(total).item())
        state["step"] += 1
    strategy.save_checkpoint(args.out / "last", state)
    if strategy.is_global_zero:
        result = {"strategy": strategy.info.name, "losses": losses, "norms": norms, "evaluations": evaluations}
        (args.out / "result.json").write_text(json.dumps(result | {"config": str(strategy.config)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a folder for checkpoints and the result")
    parser.add_argument("--steps", type=int, default=6, help="where the schedule ends")
    parser.add_argument("--stop", type=int, default=6, help="where this run ends")
    parser.add_argument("--batch", type=int, default=4, help="windows in a micro-batch, over all ranks")
    parser.add_argument("--accumulate", type=int, default=3, help="micro-batches in a step")
    parser.add_argument("--evaluate-every", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    get_strategy().launch(train, parser.parse_args())
