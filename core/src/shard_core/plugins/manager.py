"""Finding strategies: the typed face of the plugin machinery, and what it says when something is wrong."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pluggy

from shard_core.errors import (
    AmbiguousStrategy,
    BrokenBackend,
    ShardError,
    StrategyUnavailable,
    UnknownStrategy,
    nearest,
)
from shard_core.plugins import hooks
from shard_core.plugins.discovery import PRECISIONS, STRATEGIES, Offer, check_requirement, discover
from shard_core.plugins.info import StrategyInfo
from shard_core.plugins.references import cause, load_module, load_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Installed:
    """One line of ``shard list``.

    Attributes:
        name: The word users type.
        distribution: The distribution that offers it.
        version: That distribution's version.
        info: What the backend says about it; ``None`` if it cannot say.
        problem: Why it cannot be used here, as a sentence; ``None`` if it can.
    """

    name: str
    distribution: str
    version: str
    info: StrategyInfo | None
    problem: str | None

    @property
    def summary(self) -> str:
        """Return one line about what the strategy does; empty if the backend has none."""
        return self.info.summary if self.info else ""


class Plugins:
    """Finds what installed distributions offer, and loads only what is asked for.

    Args:
        discover: Lists the offers of an entry-point group; by default those of the installed distributions.

    Example:
        >>> plugins = Plugins(
        ...     lambda group: [
        ...         Offer(
        ...             name="single",
        ...             reference="shard_core.strategies.plugin",
        ...             distribution="shard-core",
        ...             version="1.0.0",
        ...         )
        ...     ]
        ... )
        >>> plugins.find("single").factory
        'shard_core.strategies.single:SingleStrategy'
        >>> plugins.find("singel")
        Traceback (most recent call last):
        ...
        shard_core.errors.UnknownStrategy: no installed package offers a strategy 'singel'; did you mean \
'single'? Installed are: single; for another, install its backend (a package named shard-...) in one pip \
command with shard-core.
    """

    def __init__(self, discover: Callable[[str], Sequence[Offer]] = discover) -> None:
        self._discover = discover
        self._managers: dict[ModuleType, pluggy.PluginManager] = {}

    def find(self, name: str) -> StrategyInfo:
        """Return what the one backend that offers a strategy says about it.

        Args:
            name: The word the user typed.

        Returns:
            The strategy's visiting card; nothing of its implementation has been imported.

        Raises:
            UnknownStrategy: If nobody offers it.
            AmbiguousStrategy: If two distributions do.
            IncompatibleBackend: If the backend wants another version of ``shard-core``.
            BrokenBackend: If the plugin cannot be imported or breaks the contract.
        """
        return self._describe(self.offer(name))

    def offer(self, name: str) -> Offer:
        """Return which distribution offers a strategy.

        Raises:
            UnknownStrategy: If none does.
            AmbiguousStrategy: If two do.
        """
        offers = self._discover(STRATEGIES)
        if all(offer.name != name for offer in offers):
            raise UnknownStrategy(_unknown(name, self.installed()))
        return _claimed_once(name, offers)

    def check_available(self, name: str) -> None:
        """Check with the backend whether its strategy can run here.

        Raises:
            StrategyUnavailable: If not, with the backend's own sentence.
            ShardError: Whatever ``find`` raises.
        """
        self._check_available(self.offer(name))

    def installed(self) -> tuple[Installed, ...]:
        """List every offered strategy, with the problem of each that cannot be used.

        Returns:
            One entry per name and distribution, sorted by name; a broken backend spoils no other's entry.
        """
        offers = self._discover(STRATEGIES)
        return tuple(self._inspect(offer, offers) for offer in offers)

    def find_precision(self, name: str) -> Callable[[], Any] | None:
        """Import the precision that a third party offers under a name.

        Args:
            name: The word the user typed as ``precision=``.

        Returns:
            A callable that makes the precision, or ``None`` if nobody offers the name.

        Raises:
            AmbiguousStrategy: If two distributions offer it.
            IncompatibleBackend: If its distribution wants another version of ``shard-core``.
            BrokenBackend: If it cannot be imported.
        """
        claims = [offer for offer in self._discover(PRECISIONS) if offer.name == name]
        if not claims:
            return None
        if len(claims) > 1:
            raise AmbiguousStrategy(_ambiguous("precision", claims))
        check_requirement(claims[0])
        factory: Callable[[], Any] = load_object(claims[0].reference, claims[0].distribution)
        return factory

    def precision_names(self) -> tuple[str, ...]:
        """List the precisions that third parties offer, without importing them."""
        return tuple(sorted({offer.name for offer in self._discover(PRECISIONS)}))

    def _inspect(self, offer: Offer, offers: Sequence[Offer]) -> Installed:
        info = problem = None
        try:
            info = self._describe(offer)
            self._check_available(_claimed_once(offer.name, offers))
        except ShardError as error:
            problem = str(error)
        return Installed(
            name=offer.name,
            distribution=offer.distribution,
            version=offer.version,
            info=info,
            problem=problem,
        )

    def _check_available(self, offer: Offer) -> None:
        reason = self._ask(offer, "shard_unavailable")
        if reason is not None and not isinstance(reason, str):
            raise BrokenBackend(
                f"{offer.owner} answers shard_unavailable({offer.name!r}) with {_kind(reason)}; "
                f"the hook returns one sentence or None."
            )
        if reason:
            raise StrategyUnavailable(f"strategy {offer.name!r} of {offer.owner} cannot run here: {reason}")

    def _describe(self, offer: Offer) -> StrategyInfo:
        info = self._ask(offer, "shard_strategy")
        if info is None:
            raise BrokenBackend(
                f"{offer.owner} offers {offer.name!r}, but its plugin {offer.reference!r} knows no strategy "
                f"of that name; shard_strategy, marked @hookimpl, must return a StrategyInfo for it."
            )
        if not isinstance(info, StrategyInfo):
            raise BrokenBackend(
                f"{offer.owner} answers shard_strategy({offer.name!r}) with {_kind(info)}; "
                f"the hook returns a StrategyInfo or None."
            )
        if info.name != offer.name:
            raise BrokenBackend(
                f"{offer.owner} answers shard_strategy({offer.name!r}) with the StrategyInfo of "
                f"{info.name!r}; the names must be the same."
            )
        return info

    def _ask(self, offer: Offer, hook: str) -> object:
        """Call one hook of the one plugin that owns the offer."""
        manager = self._load(offer)
        try:
            answer: object = getattr(manager.hook, hook)(name=offer.name)
        except ShardError:
            raise
        except Exception as error:
            raise BrokenBackend(f"{offer.owner} fails in {hook}({offer.name!r}): {cause(error)}.") from error
        return answer

    def _load(self, offer: Offer) -> pluggy.PluginManager:
        """Import a plugin and register it, once however many names it serves.

        Every plugin gets a manager of its own: only the owner of a name is asked for it, and a plugin that
        fails validation leaves nothing.
        """
        check_requirement(offer)
        module = load_module(offer.reference, offer.distribution)
        if module not in self._managers:
            manager = pluggy.PluginManager(hooks.PROJECT)
            manager.add_hookspecs(hooks)
            try:
                manager.register(module)
                manager.check_pending()
            except pluggy.PluginValidationError as error:
                raise BrokenBackend(
                    f"{offer.owner} has a plugin that does not fit the hooks of shard-core: "
                    f"{' '.join(str(error).split())}; "
                    f"the hooks are shard_strategy(name) and shard_unavailable(name)."
                ) from error
            self._managers[module] = manager
        return self._managers[module]


def _claimed_once(name: str, offers: Sequence[Offer]) -> Offer:
    claims = [offer for offer in offers if offer.name == name]
    if len(claims) > 1:
        raise AmbiguousStrategy(_ambiguous("strategy", claims))
    return claims[0]


def _unknown(name: str, installed: Sequence[Installed]) -> str:
    names = sorted({each.name for each in installed})
    known = _known_elsewhere(name.lower(), [each.info for each in installed if each.info])
    hint = f": {known}." if known else nearest(name, names) or "."
    return (
        f"no installed package offers a strategy {name!r}{hint} "
        f"Installed are: {', '.join(names) or 'none'}; for another, install its backend "
        f"(a package named shard-...) in one pip command with shard-core."
    )


#: Words for devices, and the type of device that strategies say they run on.
_DEVICES = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "tpu": "xla", "xla": "xla"}
_TRAINERS = ("accelerate", "fabric", "lightning", "pytorch_lightning")


def _known_elsewhere(word: str, infos: Sequence[StrategyInfo]) -> str | None:
    """Return what somebody means by a word that is no strategy's name here, if that is known."""
    for info in infos:
        if word in info.known_as:
            return info.known_as[word]
    if word in _DEVICES:
        there = [info.name for info in infos if _DEVICES[word] in info.devices]
        which = f"of those installed {', '.join(there)}" if there else f"shard-{_DEVICES[word]} brings some"
        which = "all that are installed do" if len(there) == len(infos) else which
        return f"it is an accelerator, so give accelerator={word!r} and a strategy that runs on it ({which})"
    if word in _TRAINERS:
        return "it is a library that trains, and what it calls a strategy mostly has the same name here"
    if word == "auto":
        return "which one fits depends on the model, so choose by what one device can hold"
    return None


def _ambiguous(what: str, claims: list[Offer]) -> str:
    owners = " and ".join(claim.owner for claim in claims)
    return f"{what} {claims[0].name!r} is claimed by {owners}; uninstall all but one of them."


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"
