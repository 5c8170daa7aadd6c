"""What a backend says about its strategy before anything of it is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shard_core import plugins
from shard_core.testing.processes.fresh_process import ask_fresh_process
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite

if TYPE_CHECKING:
    from shard_core.plugins.discovery import Offer

_CORE = "shard-core"
_CURE = f'write `dependencies = ["{_CORE}>=1,<2"]`'
_ADDED = "ADDED_LATER"
_LOWER = frozenset({">=", ">", "~=", "=="})
_UPPER = frozenset({"<", "<=", "~=", "=="})


class Metadata(Suite):
    """What a backend says about its strategy before anything of it is imported."""

    @promise(every_size=False)
    def test_metadata_is_pure(self) -> None:
        """Asking what a strategy is imports its plugin.py and config.py, and neither torch nor a backend's library.

        Usual cause:
            plugin.py or the package's __init__.py imports the strategy, or a constant from its library, at the top.
        """
        met = _met(self.strategy)
        known = {module.partition(".")[0] for module in met["known"]} | sys.stdlib_module_names
        reference = self._offer.reference
        unexpected = [module for module in met["imported"] if not _is_metadata(module, reference, known)]
        # Of a library its name says enough; of the backend's own package, which of its modules it is.
        named = sorted({top if (top := module.partition(".")[0]) not in known else module for module in unexpected})
        assert not unexpected, (
            f"asking what {self.strategy!r} is imports {', '.join(named)}; listing strategies must cost nothing, "
            "so leave that to the factory"
        )

    @promise(every_size=False)
    def test_capabilities_are_listed(self) -> None:
        """A strategy declares the capabilities that its plugin names, and none that core may add later.

        Usual cause:
            The plugin subtracts what it lacks from all there are, ``frozenset(Capability) - {...}``, and so promises
            what nobody had thought of when it was written.
        """
        declared = ask_fresh_process("declare", self.strategy, _ADDED)
        assert _ADDED not in declared, (
            f"where Capability has a member more, {self.strategy!r} declares it; name what the strategy has, as in "
            "frozenset({Capability.FP16, Capability.CLOSURE})"
        )

    @promise(every_size=False)
    def test_version_range_is_declared(self) -> None:
        """The distribution says which versions of shard-core it works with, from one up to one it does not know.

        Usual cause:
            The dependency is missing, has no upper bound, or is pinned to one version.
        """
        offer = self._offer
        if canonicalize_name(offer.distribution) == _CORE:
            return
        asked = [requirement for requirement in _required(offer.requires) if _name(requirement) == _CORE]
        assert asked, f"{offer.owner} does not depend on {_CORE}; {_CURE}"
        bounds = [bound for requirement in asked for bound in requirement.specifier]
        written = " and ".join(map(str, asked))
        pins = [
            bound
            for bound in bounds
            if bound.operator == "===" or (bound.operator == "==" and "*" not in bound.version)
        ]
        assert not pins, f"{offer.owner} wants {written}, which no repaired version can satisfy; {_CURE}"
        operators = {bound.operator for bound in bounds}
        assert operators & _LOWER, f"{offer.owner} wants {written}, which has no lower bound; {_CURE}"
        assert operators & _UPPER, f"{offer.owner} wants {written}, which has no upper bound; {_CURE}"

    @promise(every_size=False)
    def test_unavailable_has_a_sentence(self) -> None:
        """Whether the strategy can run here is answered by None or by one sentence, also where a library is missing.

        Usual cause:
            The hook answers with an empty text, a flag or an exception's name, or looks up a version without
            expecting that the library is not there.
        """
        _check_reason(_met(self.strategy)["reason"], "here")
        core = {_name(requirement) for requirement in _required(importlib.metadata.requires(_CORE) or ())}
        needed = {_name(requirement) for requirement in _required(self._offer.requires)}
        libraries = sorted(needed - core - {_CORE})
        if libraries:
            _check_reason(_met(self.strategy, *libraries)["reason"], f"without {', '.join(libraries)}")

    @property
    def _offer(self) -> Offer:
        return plugins.plugins().offer(self.strategy)


@functools.cache
def _met(name: str, *hidden: str) -> Any:
    return ask_fresh_process("discover", name, *hidden)


def _is_metadata(module: str, reference: str, known: Iterable[str]) -> bool:
    """Return whether a module may be imported when a strategy is only asked about."""
    if f"{reference}.".startswith(f"{module}.") or "config" in module.split("."):
        return True
    home, dot, _ = reference.rpartition(".")
    is_own = bool(home) and module.startswith(home + dot)
    return module.partition(".")[0] in known and not is_own


def _required(lines: Iterable[str]) -> list[Requirement]:
    """Read the requirements that hold here without an extra."""
    requirements = map(Requirement, lines)
    return [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]


def _name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


def _check_reason(reason: object, where: str) -> None:
    if reason is None:
        return
    prefix = f"{where}, shard_unavailable answers {reason!r}"
    assert isinstance(reason, str), f"{prefix}; give one sentence or None"
    text = reason.strip()
    assert " " in text, f"{prefix}; say in a sentence what is missing, or give None"
    assert len(text.splitlines()) == 1, f"{prefix}; one line is what people read in a list"
