"""``shard checkpoint export``: weights as a folder that Hugging Face's libraries load."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from shard_core.cli.checkpoint.arguments import Size, naming_a_checkpoint, storage_options
from shard_core.cli.checkpoint.figures import number, size
from shard_core.cli.checkpoint.progress import progress

if TYPE_CHECKING:
    from shard_core.checkpoint.interop.hf_export import Exported


@click.command(name="export")
@click.argument("path", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--dtype", metavar="NAME", help="fp32, bf16 or fp16; without it every tensor keeps its own.")
@click.option(
    "--max-shard-size", type=Size(), default="5GB", show_default=True, help="What one file of weights may hold."
)
@click.option(
    "--config",
    type=click.Path(),
    help="A config.json, or a folder that holds one and perhaps a tokenizer; an adapter_config.json, or a folder that "
    "holds one, for PEFT's adapters alone.",
)
@click.option("--adapter", metavar="NAME", help="Which of PEFT's adapters, where the model has several.")
@click.option("--module", metavar="NAME", help="Which module, where the checkpoint holds several.")
@click.option("--prefix", default="", help="Only tensors whose names begin with this, which is taken off.")
@click.option("--overwrite", is_flag=True, help="Replace an export that stands there.")
@storage_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, out: str, as_json: bool, **args: Any) -> None:
    """Write the weights in the checkpoint at PATH into the new folder OUT, as from_pretrained loads them.

    Safetensors files, an index where there are several, and a configuration if one is given. The exit status is 0 if
    all went well, 1 if the checkpoint is damaged or OUT cannot be written, 2 if the arguments cannot be used.
    """
    with naming_a_checkpoint(), progress("exporting", size) as report:
        from shard_core.checkpoint.interop.hf_export import export

        exported = export(path, out, progress=report, **args)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(exported), indent=2))
    else:
        _print(exported, with_config=args["config"] is not None)


def _print(exported: Exported, *, with_config: bool) -> None:
    summary = f"{number(exported.tensors, 'tensor')}, {size(exported.bytes)}, {', '.join(exported.dtypes)}"
    click.echo(f"{exported.path}: {number(len(exported.files), 'file')} of weights ({summary}).")
    for name, first in exported.tied.items():
        click.echo(f"- {name} is tied to {first}, which stands for both.")
    if not with_config:
        click.echo("- There is no config.json; --config puts one beside the weights, which from_pretrained needs.")
