"""What a process sees that meets a strategy for the first time: before it is used, and while it is built."""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.metadata
import json
import multiprocessing
import os
import pickle
import random
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
from packaging.utils import canonicalize_name

from shard_core import capability, plugins
from shard_core.plugins import hooks
from shard_core.testing.processes.script import run_python

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def ask_fresh_process(question: str, *arguments: str) -> Any:
    """Run a function of this module in a process that has imported nothing yet.

    Args:
        question: ``"discover"``, ``"declare"`` or ``"construct"``.
        arguments: Its command line.

    Returns:
        What it printed.
    """
    outcome = run_python(["-c", f"from {__name__} import {question}; {question}()", *arguments])
    assert outcome.exit_code == 0, f"a fresh process was asked to {question} the strategy, and {outcome}"
    return json.loads(outcome.output.splitlines()[-1])


def discover() -> None:
    """Query a backend's strategy and whether it can run, and print the answer and what it imported.

    The strategy's name stands on the command line, then the distributions that are to look uninstalled.
    """
    name, *hidden = sys.argv[1:]
    if hidden:
        _hide(hidden)
    before = set(sys.modules)
    plugins.find(name)
    asked = pluggy.PluginManager(hooks.PROJECT)
    asked.add_hookspecs(hooks)
    asked.register(importlib.import_module(plugins.plugins().offer(name).reference))
    reason = asked.hook.shard_unavailable(name=name)
    answer = {"imported": sorted(set(sys.modules) - before), "known": sorted(before), "reason": reason}
    print(json.dumps(answer, default=repr))


def declare() -> None:
    """Print the capabilities a backend declares where core has one more than it could know of.

    The strategy's name stands on the command line, then the name of the capability that is new.
    """
    name, new = sys.argv[1:]
    known = capability.Capability
    named = {each.name: each.value for each in known} | {new: "does what nobody has thought of yet"}
    later = enum.Enum(known.__name__, named, module=known.__module__)  # type: ignore[misc]  # made of data
    for module in list(sys.modules.values()):
        for attribute, value in list(vars(module).items()):
            if value is known:
                setattr(module, attribute, later)
    print(json.dumps([each.name for each in plugins.find(name).capabilities]))


def construct() -> None:
    """Build a strategy and print what changed in this process.

    The command line holds the pickled ``Subject`` as hexadecimal digits.
    """
    subject = pickle.loads(bytes.fromhex(sys.argv[1]))
    finder = plugins.plugins()
    plugins.load_object(finder.find(subject.name).factory, finder.offer(subject.name).distribution)
    before = _surroundings()
    built = subject.strategy()
    after = _surroundings()
    del built
    print(json.dumps([what for what in before if before[what] != after[what]]))


def _surroundings() -> dict[str, Any]:
    """Record what building a strategy must not change, under the words a person would use."""
    import torch
    import torch.distributed as dist

    return {
        "joins a process group": dist.is_available() and dist.is_initialized(),
        "takes hold of a GPU": torch.cuda.is_initialized(),
        "starts threads": [thread.name for thread in threading.enumerate()],
        "starts threads outside Python": len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0,
        "starts processes": len(multiprocessing.active_children()),
        "changes environment variables": dict(os.environ),
        "changes the working directory": os.getcwd(),
        "draws random numbers": (torch.get_rng_state().tolist(), random.getstate()),
        "changes torch's default dtype": torch.get_default_dtype(),
        "changes torch's default device": torch.get_default_device(),
        "changes torch's number of threads": torch.get_num_threads(),
    }


def _hide(distributions: Sequence[str]) -> None:
    """Hide distributions, as if they were not installed, from imports and from readers of metadata."""
    names = {canonicalize_name(each) for each in distributions}
    modules = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if names >= {canonicalize_name(owner) for owner in owners}
    }
    sys.meta_path[:] = [_Blindfold(finder, names, modules) for finder in sys.meta_path]


class _Blindfold(importlib.abc.MetaPathFinder):
    """Finds what another finder finds, but for some distributions and their modules."""

    def __init__(self, finder: Any, names: Iterable[str], modules: Iterable[str]) -> None:
        self._finder = finder
        self._names = names
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._modules:
            return None
        found: ModuleSpec | None = self._finder.find_spec(fullname, path, target)
        return found

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        find = getattr(self._finder, "find_distributions", None)
        found = find(context or importlib.metadata.DistributionFinder.Context()) if find else ()
        return [each for each in found if canonicalize_name(each.name) not in self._names]
