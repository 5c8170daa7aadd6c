"""How values leave a module: ``save_pretrained`` writes them whole, ``state_dict`` and copies refuse to lack some."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.tensor import DTensor

from shard_core.checkpoint.all_ranks import on_all_ranks
from shard_core.checkpoint.keys import name_in
from shard_core.checkpoint.state.gather import full_tensors
from shard_core.errors import CollectiveError, SetupError
from shard_core.parameters import plain_module_name, plain_name
from shard_core.replicas import note_left_empty

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.collectives.interface import Collectives

#: How modules of transformers, diffusers, PEFT and others are written; recognised by its name alone.
METHOD = "save_pretrained"
_DEEPCOPY = "__deepcopy__"


class PretrainedSaves:
    """Replaces ``save_pretrained`` of a module and of those inside it.

    Rank 0 alone writes. Where it does not hold the weights whole, every rank must call; they are gathered, and all
    that the method reads through ``state_dict`` is whole.

    Args:
        module: The user's, before setup has changed it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._kind = type(module).__name__  # engines may exchange the class
        names = {part: plain_module_name(name) for name, part in module.named_modules()}
        self._prefixes = {part: f"{name}." if name else "" for part, name in names.items()}
        self._methods: dict[torch.nn.Module, _Method] = {}
        self._writing = False

    def install(
        self, strategy: str, state: Callable[[], TrainingState], collectives: Collectives, *, spread: bool
    ) -> None:
        """Replace the methods.

        Args:
            strategy: The strategy's name, for messages.
            state: Describes which parts of the module live on this rank.
            collectives: Of all ranks.
            spread: Whether a rank's tensors are not the whole ones.
        """
        self._strategy, self._state, self._collectives, self._spread = strategy, state, collectives, spread
        for part in self._prefixes:
            if callable(getattr(type(part), METHOD, None)) and METHOD not in vars(part):
                self._methods[part] = vars(part)[METHOD] = _Method(part, self._save)

    def remove(self) -> None:
        """Restore the methods of the classes."""
        for part in self._methods:
            vars(part).pop(METHOD, None)
        self._methods.clear()

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked = {**inspect.signature(original).bind(*args, **kwargs).arguments, **kwargs}
        is_writer = self._collectives.rank == 0
        if self._writing or asked.get("state_dict") is not None or not self._spread:
            return original(*args, **kwargs) if is_writer or asked.get("is_main_process") else None
        self._wait_for_all()
        whole = {name_in(key): tensor for key, tensor in full_tensors(self._state(), self._collectives) if is_writer}
        written: list[Any] = []

        def write() -> None:
            if is_writer:
                with self._replaced_state_dicts(self._as_stored(whole)):
                    written.append(original(*args, **kwargs))

        on_all_ranks(self._collectives, METHOD, write)
        return written[0] if written else None

    def _wait_for_all(self) -> None:
        """Wait for all ranks; a folder that lacks what some of them hold would be noticed much later."""
        try:
            self._collectives.barrier(f"{METHOD}, which gathers what module_state_dict gives")
        except CollectiveError as error:
            raise type(error)(
                f"{METHOD} was not called on every rank, and under strategy {self._strategy!r} none holds the weights "
                f"of {self._kind} whole; let every rank call it, and rank 0 writes, or let every rank call `state = "
                f"strategy.module_state_dict(model)` and rank 0 `{METHOD}(folder, state_dict=state)`; {error}"
            ) from error

    def _as_stored(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cast tensors to the dtypes they have in the module, where an engine steps more precise ones."""
        module = next(iter(self._prefixes))
        dtypes = {plain_name(name): each.dtype for name, each in (*module.named_parameters(), *module.named_buffers())}
        stored: dict[int, torch.Tensor] = {}
        for name, tensor in whole.items():
            if id(tensor) not in stored:  # tied ones stay one
                stored[id(tensor)] = tensor.to(dtypes.get(name, tensor.dtype))
        return {name: stored[id(tensor)] for name, tensor in whole.items()}

    @contextlib.contextmanager
    def _replaced_state_dicts(self, whole: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Replace ``state_dict`` of every part by one that returns whole tensors, ties kept."""
        for part, prefix in self._prefixes.items():
            vars(part)["state_dict"] = functools.partial(_state_dict, whole, prefix)
        self._writing = True
        try:
            yield
        finally:
            self._writing = False
            for part in self._prefixes:
                del vars(part)["state_dict"]


class _Method:
    """What a module has in place of its ``save_pretrained``; a copy of the module has its class's method again."""

    def __init__(self, part: torch.nn.Module, save: Callable[..., Any]) -> None:
        self._part = part
        self._save = save
        functools.update_wrapper(self, getattr(part, METHOD))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save, as the class's method would on whole tensors."""
        return self._save(self.__wrapped__, *args, **kwargs)  # type: ignore[attr-defined]  # from update_wrapper

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes, in a copy, the method of the copy's class: its copied module has no other yet."""
        return getattr, (self._part, METHOD)


def _state_dict(
    whole: Mapping[str, torch.Tensor],
    own: str,
    *,
    destination: dict[str, Any] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> dict[str, Any]:
    """Return what ``state_dict`` of a part would, were its tensors whole."""
    del keep_vars
    result: dict[str, Any] = {} if destination is None else destination
    result.update({prefix + name.removeprefix(own): each for name, each in whole.items() if name.startswith(own)})
    return result


class PartialStateDict:
    """Refuses ``state_dict``, and to load one, where there is nothing in place of a parameter's values; and copies.

    Parts pass, DTensors or flat ones: loaded into the same module, they restore what was there.

    Args:
        module: The user's, before setup has changed it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._shapes = {part: _shapes(part) for part in module.modules()}
        self._handles: list[RemovableHandle] = []
        self._copies = _NoCopies(module)

    def install(self, strategy: str, called: torch.nn.Module, *, sharded: bool) -> None:
        """Register hooks on those parts of the module that have parameters, which engines may empty at any time.

        Args:
            strategy: The strategy's name, for the message.
            called: What the engine has returned for the module.
            sharded: Whether the module holds parts of parameters.
        """
        self._copies.install(strategy, called, sharded=sharded)
        for part, shapes in self._shapes.items():
            if shapes:
                check = functools.partial(_check, strategy, shapes)
                self._handles.append(part.register_state_dict_pre_hook(check))
        for part in self._shapes:
            if any(_first_emptied(each, self._shapes.get(each, {})) is not None for each in part.modules()):
                check_load = functools.partial(_check_load, strategy, self._shapes)
                self._handles.append(part.register_load_state_dict_pre_hook(check_load))

    def spread(self) -> dict[torch.nn.Module, list[torch.nn.Parameter]]:
        """List the parts of the module whose parameters have other shapes than at setup, or are spread by torch."""
        found = {}
        for part, shapes in self._shapes.items():
            shares = [each for name, each in part.named_parameters(recurse=False) if _is_share(each, shapes.get(name))]
            if shares:
                found[part] = shares
        return found

    def remove(self) -> None:
        """Remove the hooks, and note what cannot be set up again."""
        for handle in self._handles:
            handle.remove()
        self._copies.remove()
        for part, shapes in self._shapes.items():
            if _first_emptied(part, shapes) is not None:
                note_left_empty(part)


class _NoCopies:
    """Refuses ``copy.deepcopy``, also ``AveragedModel``'s, of what an engine's hooks would follow, and of shards.

    Args:
        module: The user's, before setup has changed it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._hooked = {part: _hooks(part) for part in module.modules()}
        self._refusing: list[torch.nn.Module] = []

    def install(self, strategy: str, called: torch.nn.Module, *, sharded: bool) -> None:
        """Set a ``__deepcopy__`` that refuses on what the engine has changed.

        Args:
            strategy: The strategy's name, for the message.
            called: What the engine has returned for the module; if that can be copied, it has a ``__deepcopy__``.
            sharded: Whether the module holds parts of parameters.
        """
        self._refusing = [part for part, hooks in self._hooked.items() if sharded or _hooks(part) != hooks]
        if called not in self._hooked and _DEEPCOPY not in vars(called):
            self._refusing.append(called)
        for part in self._refusing:
            vars(part)[_DEEPCOPY] = functools.partial(_refuse_copy, strategy)

    def remove(self) -> None:
        """Remove what refuses."""
        for part in self._refusing:
            vars(part).pop(_DEEPCOPY, None)
        self._refusing.clear()


def _hooks(part: torch.nn.Module) -> list[int]:
    return [*part._forward_pre_hooks, *part._forward_hooks]


def _refuse_copy(strategy: str, memo: object) -> NoReturn:
    del memo
    raise SetupError(
        f"a module was copied after its setup under strategy {strategy!r}, by copy.deepcopy or AveragedModel; copy it "
        "before, or let every rank call strategy.module_state_dict(model) and rank 0 load what that returns into a "
        "module built anew; for a moving average take shard_core.ExponentialMovingAverage."
    )


def _check(
    strategy: str, shapes: dict[str, tuple[int, ...]], module: torch.nn.Module, prefix: str, keep_vars: bool
) -> None:
    # Who asks for the parameters themselves wants to know which there are; engines do.
    emptied = None if keep_vars else _first_emptied(module, shapes)
    if emptied is not None:
        raise SetupError(
            f"state_dict() would give {prefix + emptied!r} as this rank holds it under strategy {strategy!r}, in the "
            f"shape {_shapes(module)[emptied]} and not {shapes[emptied]}; let every rank call "
            "strategy.module_state_dict(model), which gives rank 0 whole tensors, or strategy.save_checkpoint()."
        )


def _check_load(
    strategy: str,
    shapes: Mapping[torch.nn.Module, dict[str, tuple[int, ...]]],
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *_: object,
) -> None:
    """Refuse before anything is loaded: torch loads part by part."""
    for name, part in module.named_modules():
        first = _first_emptied(part, shapes.get(part, {}))
        emptied = f"{prefix}{name}.{first}" if name else f"{prefix}{first}"
        if first is None or emptied not in state_dict:
            continue
        raise SetupError(
            f"load_state_dict() was given {emptied!r}, which strategy {strategy!r} keeps in parts that it "
            "alone can fill; load it before setup, or let every rank call strategy.load_weights() or load_checkpoint()."
        )


def _first_emptied(part: torch.nn.Module, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Find a parameter that has lost its elements; an engine may show it whole at another time."""
    now = _shapes(part)
    had = (name for name, shape in shapes.items() if math.prod(shape))
    return next((name for name in had if not math.prod(now.get(name, shapes[name]))), None)


def _is_share(parameter: torch.nn.Parameter, whole: tuple[int, ...] | None) -> bool:
    if isinstance(parameter, DTensor):
        return parameter.device_mesh.size() > 1
    return whole is not None and tuple(parameter.shape) != whole


def _shapes(part: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    own: dict[str, Any] = dict(part.named_parameters(recurse=False, remove_duplicate=False))
    return {name: tuple(each.shape) for name, each in own.items() if not isinstance(each, DTensor)}
