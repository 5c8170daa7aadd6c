from __future__ import annotations

import importlib.metadata
import sys

import pytest

from shard_core.errors import BrokenBackend, IncompatibleBackend
from shard_core.plugins.discovery import PRECISIONS, STRATEGIES, Offer, check_requirement, discover


def offers_of(distribution: str) -> list[Offer]:
    return [offer for offer in discover(STRATEGIES) if offer.distribution == distribution]


def test_built_ins_are_found_like_any_other():
    assert [(offer.name, offer.reference) for offer in offers_of("shard-core")] == [
        ("ddp", "shard_core.strategies.plugin"),
        ("single", "shard_core.strategies.plugin"),
    ]


def test_metadata_is_read_and_nothing_imported(site):
    site.install(
        "shard-toy",
        version="2.1",
        requires=("shard-core>=1", "numpy"),
        entries={STRATEGIES: {"toy": "toy_a", "toy_two": "toy_a"}},
        modules={"toy_a": "raise RuntimeError('imported')"},
    )
    assert offers_of("shard-toy") == [
        Offer(
            name=name,
            reference="toy_a",
            distribution="shard-toy",
            version="2.1",
            requires=("shard-core>=1", "numpy"),
        )
        for name in ("toy", "toy_two")
    ]
    assert "toy_a" not in sys.modules


def test_groups_are_apart(site):
    site.install("shard-eight", entries={PRECISIONS: {"fp8": "eight:make"}})
    assert offers_of("shard-eight") == []
    assert [offer.name for offer in discover(PRECISIONS)] == ["fp8"]


def test_one_distribution_in_two_places_counts_once_where_it_is_imported_from(sites):
    before, after = sites
    after.install("shard-toy", version="1.0", entries={STRATEGIES: {"toy": "toy_old", "gone": "toy_old"}})
    before.install("shard-toy", version="2.0", entries={STRATEGIES: {"toy": "toy_new"}})
    assert [(offer.name, offer.version) for offer in offers_of("shard-toy")] == [("toy", "2.0")]


def test_what_an_interrupted_installation_left_is_the_same_distribution(site):
    info = site.install("shard-toy", entries={STRATEGIES: {"toy": "toy_a"}})
    left = info.rename(info.with_name("~hard_toy-1.0.0.dist-info"))
    site.install("shard-toy", entries={STRATEGIES: {"toy": "toy_a"}})
    assert left.exists()
    assert len(offers_of("shard-toy")) == 1


def test_two_distributions_that_claim_a_name_are_both_listed(site):
    for name in ("shard-toy", "shard-other"):
        site.install(name, entries={STRATEGIES: {"toy": "toy_a"}})
    owners = [offer.distribution for offer in discover(STRATEGIES) if offer.name == "toy"]
    assert owners == ["shard-other", "shard-toy"]


@pytest.mark.parametrize(
    "requires",
    [
        (),
        ("shard-core>=1,<2",),
        ("Shard_Core >= 1",),
        ("shard-core",),
        ("torch==0.1",),
        ("shard-core>=99; extra == 'testing'",),
        ("shard-core>=99; python_version < '3'",),
        ("shard-core-tools>=99",),
    ],
)
def test_requirement_that_is_met(requires):
    check_requirement(Offer(name="x", reference="x", distribution="shard-x", version="1", requires=requires))


@pytest.mark.parametrize("line", ["shard-core>=99", "shard.core<1", "shard-core[testing]==0.3.0"])
def test_requirement_that_is_not_met(line):
    found = importlib.metadata.version("shard-core")
    with pytest.raises(IncompatibleBackend) as caught:
        check_requirement(Offer(name="x", reference="x", distribution="shard-x", version="1.5", requires=(line,)))
    wanted = line.removeprefix("shard-core").removeprefix("shard.core").removeprefix("[testing]")
    assert str(caught.value) == (
        f"shard-x 1.5 wants shard-core{wanted}, and shard-core {found} is installed; "
        "install versions of both that fit, in one pip command."
    )


def test_requirement_that_cannot_be_read():
    offer = Offer(name="x", reference="x", distribution="shard-x", version="1", requires=("shard-core >> 1",))
    with pytest.raises(BrokenBackend, match="shard-x 1 has a requirement that cannot be read, 'shard-core >> 1'"):
        check_requirement(offer)
