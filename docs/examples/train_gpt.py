"""Train a byte-level GPT on Python's own standard library, or on any text, under any strategy."""

import argparse
import itertools
import json
import os
import resource
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from shard_core import get_strategy
from shard_core.checkpoint import latest

CONTEXT, WIDTH, HEADS, LAYERS = 128, 160, 4, 4


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        kind = {"activation": "gelu", "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **kind) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, x.dtype)
        for block in self.blocks:
            x = block(x, causal, is_causal=True)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows(Dataset):
    def __init__(self, text):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, i):
        window = self.text[i * CONTEXT : (i + 1) * CONTEXT + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def read_text(path):
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*.py") if "site-packages" not in p.parts)
    return b"".join(file.read_bytes() for file in files)[: 2**24]


@torch.no_grad()
def evaluate(strategy, model, loader):
    losses = [model(**batch) for batch, _ in zip(loader, range(8), strict=False)]
    return strategy.all_reduce(torch.stack(losses).mean()).item()


@torch.no_grad()
def generate(strategy, model, prompt, length):
    generator, text = torch.Generator().manual_seed(0), list(prompt.encode())
    for _ in range(length):
        seen = text[-CONTEXT:]
        padded = torch.tensor([seen + [0] * (CONTEXT - len(seen))])  # one shape: engines that compile do so once
        logits = model(strategy.batch_to_device(padded))[0].float().cpu()[len(seen) - 1]
        text.append(int(torch.multinomial(F.softmax(logits / 0.7, -1), 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def train(strategy, args):
    strategy.seed_everything(args.seed)
    text = read_text(args.data)
    if len(text) // 20 <= args.batch * CONTEXT:  # the twentieth that is held out must fill a batch
        raise ValueError(f"{args.data} has only {len(text):,} bytes; give a longer text, or a smaller --batch.")
    parts = text[: -len(text) // 20], text[-len(text) // 20 :]
    loaders = [DataLoader(Windows(part), args.batch, shuffle=part is parts[0], drop_last=True) for part in parts]
    batches, held_out = (strategy.process_dataloader(loader, split_batches=True) for loader in loaders)
    with strategy.module_init_context():
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": batches, "step": 0}
    if args.resume:
        strategy.load_checkpoint(strategy.broadcast(latest(args.checkpoint) or args.checkpoint), state)
    console = Console(stderr=True, quiet=not strategy.is_global_zero)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[info]}")
    losses, tokens, speed, started = [], 0, 0.0, time.perf_counter()
    data = (batch for _ in itertools.count() for batch in batches)
    with Progress(*columns, console=console) as progress:
        title = f"{strategy.info.name} x {strategy.world_size}"
        bar = progress.add_task(title, total=args.steps, completed=state["step"], info="")
        while state["step"] < args.steps:
            total = 0.0
            for micro in range(args.accumulate):
                with strategy.no_backward_sync(model, enabled=micro < args.accumulate - 1):
                    loss = model(**next(data)) / args.accumulate
                    strategy.backward(loss, model)
                total += loss.detach()
                tokens += args.batch * CONTEXT
            strategy.clip_gradients_norm(model, optimizer, args.clip)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            scheduler.step()
            state["step"] += 1
            losses.append(strategy.all_reduce(total).item())
            speed = tokens / (time.perf_counter() - started)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            progress.update(bar, advance=1, info=f"loss {losses[-1]:.3f} {speed:,.0f} tokens/s {memory:,.0f} MiB")
    if args.checkpoint:
        strategy.save_checkpoint(f"{args.checkpoint}/step-{state['step']}", state)
    validation_loss, sample = evaluate(strategy, model, held_out), generate(strategy, model, "def ", 200)
    console.print(f"\nvalidation loss {validation_loss:.3f}, where guessing has 5.545. It writes:\n")
    console.print(sample, markup=False, highlight=False)
    result = {"strategy": strategy.info.name, "world_size": strategy.world_size, "steps": state["step"]}
    result |= {"loss_first": losses[0] if losses else None, "loss_last": losses[-1] if losses else None}
    return result | {"validation_loss": validation_loss, "tokens_per_second": round(speed)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default=os.environ.get("SHARD_STRATEGY", "fsdp"), help="see `shard list`")
    parser.add_argument("--devices", default="auto", help="ranks to start on this host")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a file or a folder")
    parser.add_argument("--batch", type=int, default=24, help="windows of text in a micro-batch, over all ranks")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--checkpoint", metavar="DIR", help="where to save at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint DIR")
    result = get_strategy(args.strategy, devices=args.devices, precision=args.precision).launch(train, args)
    if args.json and result:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
