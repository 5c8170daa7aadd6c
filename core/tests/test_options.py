from __future__ import annotations

import dataclasses
import inspect

import pytest

from shard_core.errors import BrokenBackend, InvalidOption
from shard_core.options import Option, check_names, option, options_of
from shard_core.run_options import RunOptions
from shard_core.selection import get_strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    size: int | None = option(None, "how large")
    overlap: bool = option(True, "do both at once")


def test_options_are_listed_in_order_with_types_as_written():
    assert options_of(Config) == (
        Option(name="size", type="int | None", default=None, help="how large"),
        Option(name="overlap", type="bool", default=True, help="do both at once"),
    )
    assert Config(size=3) == Config(size=3, overlap=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hasty:
    size: int = 3


class Plain:
    pass


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            Hasty,
            "declares 'size' without the line people read about it; write size: int = option(DEFAULT, HELP).",
        ),
        (Plain, "is no dataclass; decorate it with @dataclasses.dataclass(frozen=True, kw_only=True)."),
    ],
)
def test_a_config_that_its_author_did_not_finish_is_named(config, sentence):
    with pytest.raises(BrokenBackend) as caught:
        options_of(config)
    assert str(caught.value) == f"{__name__}.{config.__name__} {sentence}"


def test_names_that_exist():
    check_names("it", {"size": 1}, ["size", "overlap"])
    check_names("it", {}, [])


@pytest.mark.parametrize(
    ("given", "allowed", "sentence"),
    [
        (
            "siez",
            ["size", "overlap"],
            "it has no option 'siez'; did you mean 'size'? Its options are: size, overlap.",
        ),
        ("colour", ["size"], "it has no option 'colour'. Its options are: size."),
        ("size", [], "it has no option 'size'. It takes none."),
    ],
)
def test_names_that_do_not_exist(given, allowed, sentence):
    with pytest.raises(InvalidOption) as caught:
        check_names("it", {given: 1}, allowed)
    assert str(caught.value) == sentence


def test_a_name_from_elsewhere_gets_its_reason():
    with pytest.raises(InvalidOption) as caught:
        check_names("it", {"width": 1}, ["size"], {"width": "the option is called size"})
    assert str(caught.value) == "it takes no 'width': the option is called size."


def test_get_strategy_takes_exactly_the_common_options():
    parameters = inspect.signature(get_strategy).parameters
    common = {
        name: (parameter.default, parameter.annotation)
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert common == {each.name: (each.default, each.type) for each in options_of(RunOptions)}
