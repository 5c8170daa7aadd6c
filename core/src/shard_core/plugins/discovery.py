"""What installed distributions offer, read from their metadata without importing any of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from shard_core.errors import BrokenBackend, IncompatibleBackend

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

#: Entry-point groups: a strategy's value is its plugin module, a precision's value is ``"module:callable"``.
STRATEGIES = "shard.strategies"
PRECISIONS = "shard.precisions"

_CORE = "shard-core"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """One name that one distribution offers.

    Attributes:
        name: The word users type.
        reference: What it refers to, as written in the metadata.
        distribution: The distribution that offers it.
        version: That distribution's version.
        requires: That distribution's ``Requires-Dist`` lines.
    """

    name: str
    reference: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """Return the distribution and its version, for messages."""
        return f"{self.distribution} {self.version}"


def discover(group: str) -> tuple[Offer, ...]:
    """List what installed distributions offer in an entry-point group.

    A name that two distributions claim is listed twice. A distribution found in two places on ``sys.path``
    counts once, where it would be imported from.

    Args:
        group: ``STRATEGIES`` or ``PRECISIONS``.

    Returns:
        The offers, sorted by name and distribution.

    Example:
        >>> [offer.name for offer in discover(STRATEGIES) if offer.distribution == "shard-core"]
        ['ddp', 'single']
    """
    return _offers(group, tuple(_state(place) for place in sys.path))


@functools.lru_cache(maxsize=16)
def _offers(group: str, places: tuple[object, ...]) -> tuple[Offer, ...]:
    del places  # what else the answer depends on
    offers: dict[tuple[str, str], Offer] = {}
    for entry in importlib.metadata.entry_points(group=group):
        owner = entry.dist
        assert owner is not None, "entry points read from metadata know their distribution"
        # The interpreter distinguishes distributions by folder name, which an interrupted
        # installation changes ("~hard_core-1.0.0.dist-info"); the name inside is the same.
        key = (entry.name, canonicalize_name(owner.name))
        if key not in offers:
            offers[key] = Offer(
                name=entry.name,
                reference=entry.value,
                distribution=owner.name,
                version=owner.version,
                requires=tuple(owner.requires or ()),
            )
    return tuple(offers[key] for key in sorted(offers))


def _state(place: str) -> tuple[str, int, int]:
    """Return when something was installed into a place last: reading all metadata anew takes some 20 ms."""
    try:
        return place, os.stat(place or ".").st_mtime_ns, len(os.listdir(place or "."))
    except NotADirectoryError:  # an archive
        return place, os.stat(place).st_mtime_ns, 0
    except FileNotFoundError:
        return place, 0, 0


def check_requirement(offer: Offer) -> None:
    """Check a distribution's own requirement on ``shard-core`` against the one installed.

    pip checks it once, at installation; this one also sees what was changed afterwards, and sees it before
    anything is imported that could fail in stranger ways.

    Args:
        offer: What is about to be imported.

    Raises:
        IncompatibleBackend: If the distribution asks for another version of ``shard-core``.
        BrokenBackend: If a requirement cannot be read.

    Example:
        >>> offer = Offer(
        ...     name="x", reference="x", distribution="shard-x", version="3.0", requires=("shard-core>=99",)
        ... )
        >>> check_requirement(offer)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        shard_core.errors.IncompatibleBackend: shard-x 3.0 wants shard-core>=99, and shard-core ... is \
installed; install versions of both that fit, in one pip command.
    """
    found = importlib.metadata.version(_CORE)
    for wanted in _wanted(offer):
        if not wanted.contains(found, prereleases=True):
            raise IncompatibleBackend(
                f"{offer.owner} wants {_CORE}{wanted}, and {_CORE} {found} is installed; "
                f"install versions of both that fit, in one pip command."
            )


@functools.lru_cache(maxsize=64)
def _wanted(offer: Offer) -> tuple[SpecifierSet, ...]:
    """Read which versions of ``shard-core`` a distribution asks for, once: a strategy is looked up often."""
    wanted = []
    for line in offer.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise BrokenBackend(f"{offer.owner} has a requirement that cannot be read, {line!r}.") from error
        if canonicalize_name(requirement.name) != _CORE:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            wanted.append(requirement.specifier)
    return tuple(wanted)
