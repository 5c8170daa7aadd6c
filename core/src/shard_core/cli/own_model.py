"""What verbs that train the user's own model have alike: how it is named and made, and kept from spoiling output."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shard_core.errors import RankFailed, ShardError
from shard_core.testing.option_arguments import Assignment

if TYPE_CHECKING:
    from shard_core.parity.recipe import Recipe

F = TypeVar("F", bound=Callable[..., Any])

_ARGUMENTS = (
    click.argument("make_model", metavar="SCRIPT.PY:MAKE_MODEL"),
    click.option("--strategy", required=True, metavar="NAME", help="The strategy, as `shard list` shows it."),
    click.option("--batch", metavar="SCRIPT.PY:FUNCTION", help="Returns the batch, where make_model does not."),
    click.option(
        "--loss", metavar="SCRIPT.PY:FUNCTION", help="function(output, batch), where the model returns no loss."
    ),
    click.option("--devices", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks on this host."),
    click.option("--accelerator", default="cpu", show_default=True, help="Device type of all runs."),
    click.option("--precision", default="32-true", show_default=True, help="Which dtype where, in all runs."),
    click.option(
        "--option", "assignments", type=Assignment(), multiple=True, help="An option of the strategy; repeatable."
    ),
    click.option("--seed", type=click.IntRange(min=0, max=2**32 - 1), default=0, show_default=True),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


class Unusable(click.ClickException):
    """The arguments cannot be used, or the model cannot be trained."""

    exit_code = 2


def takes_a_model(function: F) -> F:
    """Add the arguments that say what is trained, by which strategy and where, to a command.

    Args:
        function: To become a command.

    Returns:
        The same function.
    """
    for add in reversed(_ARGUMENTS):
        function = add(function)
    return function


def make_recipe(folder: str, args: Mapping[str, Any], **more: Any) -> Recipe:
    """Build a recipe from a command's arguments.

    Args:
        folder: Where initial weights and the batch are put for the ranks.
        args: The command's arguments.
        more: Other fields of the recipe.

    Raises:
        InvalidOption: If a function cannot be found or takes other arguments, or its script cannot be imported.
    """
    from shard_core.parity.recipe import Recipe, optimizer_named
    from shard_core.parity.script import ScriptFunction

    return Recipe(
        make_model=ScriptFunction.of(args["make_model"]),
        make_batch=ScriptFunction.of(args["batch"]) if args["batch"] else None,
        loss=ScriptFunction.of(args["loss"], "output", "batch") if args["loss"] else None,
        optimizer=optimizer_named(args["optimizer"]),
        seed=args["seed"],
        folder=folder,
        **more,
    )


@contextlib.contextmanager
def unusable(outcome: str) -> Iterator[None]:
    """Convert whatever is raised inside into a sentence, with a traceback if it is not on purpose.

    Args:
        outcome: What it comes to, such as "nothing could be compared".
    """
    try:
        yield
    except RankFailed as error:
        raise Unusable(error.sentence or str(error)) from error
    except ShardError as error:
        raise Unusable(str(error)) from error
    except Exception as error:
        click.echo(_users_frames(error), err=True)
        raise Unusable(f"{outcome}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def other_output_on_stderr(wanted: bool) -> Iterator[None]:
    """Redirect what the user's script prints, on any rank, so that it does not stand among the JSON.

    Args:
        wanted: Whether JSON will be printed.
    """
    if not wanted:
        yield
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as kept:
        os.dup2(2, 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept.fileno(), 1)


def _users_frames(error: Exception) -> str:
    """Format a traceback from the user's own frames on, if there are any: what called them is of no use there."""
    from shard_core.parity.script import is_script

    trace = traceback.TracebackException.from_exception(error)
    first = next((place for place, frame in enumerate(trace.stack) if is_script(frame.filename)), 0)
    del trace.stack[:first]
    return "".join(trace.format())
