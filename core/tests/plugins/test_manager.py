from __future__ import annotations

import sys

import pytest

from shard_core.errors import (
    AmbiguousStrategy,
    BrokenBackend,
    IncompatibleBackend,
    StrategyUnavailable,
    UnknownStrategy,
)
from shard_core.plugins import Plugins
from shard_core.plugins.discovery import PRECISIONS, STRATEGIES

HEAD = """
from shard_core.plugins import StrategyInfo, hookimpl
"""

TOY = (
    HEAD
    + """
@hookimpl
def shard_strategy(name):
    if name in ("toy", "toy_two"):
        return StrategyInfo(name=name, summary=f"{name} of tests", factory="toy_factory:Toy")
"""
)


def install_toy(site, module="toy_plugin", text=TOY, name="shard-toy", words=("toy",), **kwargs):
    site.install(name, entries={STRATEGIES: dict.fromkeys(words, module)}, modules={module: text}, **kwargs)


def test_find_imports_the_plugin_and_nothing_else(site):
    install_toy(site)
    info = Plugins().find("toy")
    assert (info.name, info.summary, info.factory) == ("toy", "toy of tests", "toy_factory:Toy")
    assert "toy_factory" not in sys.modules


def test_several_names_of_one_module(site):
    install_toy(site, words=("toy", "toy_two"))
    plugins = Plugins()
    assert [plugins.find(name).summary for name in ("toy", "toy_two", "toy")] == [
        "toy of tests",
        "toy_two of tests",
        "toy of tests",
    ]


def test_only_the_owner_of_a_name_is_asked(site):
    install_toy(site)
    greedy = HEAD + (
        "@hookimpl\ndef shard_strategy(name):\n    return StrategyInfo(name=name, summary='greedy', factory='g:G')\n"
    )
    install_toy(site, module="greedy_plugin", text=greedy, name="shard-greedy", words=("greedy",))
    plugins = Plugins()
    assert plugins.find("greedy").summary == "greedy"
    assert plugins.find("toy").summary == "toy of tests"


def test_unknown_name_says_the_nearest_what_is_installed_and_what_to_install(site):
    install_toy(site)
    with pytest.raises(UnknownStrategy) as caught:
        Plugins().find("toyy")
    message = str(caught.value)
    assert message.startswith("no installed package offers a strategy 'toyy'; did you mean 'toy'? Installed are: ")
    assert {"ddp", "single", "toy"} <= set(message.partition("Installed are: ")[2].partition(";")[0].split(", "))
    assert message.endswith("install its backend (a package named shard-...) in one pip command with shard-core.")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("toy2", ": it is 'toy' with the option size=2. Installed are: "),
        ("TPU", ": it is an accelerator, so give accelerator='tpu' and a strategy that runs on it ("),
        ("gpu", ": it is an accelerator, so give accelerator='gpu' and a strategy that runs on it ("),
        ("lightning", ": it is a library that trains, and what it calls a strategy mostly has the same name here."),
        ("auto", ": which one fits depends on the model, so choose by what one device can hold."),
        ("ddp_spawn", ": it is 'ddp', of which launch() starts as many ranks as devices= says."),
    ],
)
def test_names_from_elsewhere_get_what_is_meant(site, word, said):
    install_toy(
        site, text=TOY.replace("summary=", "known_as={'toy2': \"it is 'toy' with the option size=2\"}, summary=")
    )
    with pytest.raises(UnknownStrategy) as caught:
        Plugins().find(word)
    assert str(caught.value).startswith(f"no installed package offers a strategy {word!r}{said}")
    assert "Installed are: " in str(caught.value)


def test_unknown_name_that_resembles_none():
    with pytest.raises(UnknownStrategy, match=r"a strategy 'qqqq'\. Installed are: none; for another,"):
        Plugins(lambda group: []).find("qqqq")


def test_name_claimed_twice_names_both_owners(site):
    install_toy(site)
    install_toy(site, module="other_plugin", name="shard-other", version="0.5")
    with pytest.raises(AmbiguousStrategy) as caught:
        Plugins().find("toy")
    assert str(caught.value) == (
        "strategy 'toy' is claimed by shard-other 0.5 and shard-toy 1.0.0; uninstall all but one of them."
    )


def test_version_is_checked_before_anything_is_imported(site):
    install_toy(site, text="raise RuntimeError('imported')", requires=("shard-core>=99",))
    with pytest.raises(IncompatibleBackend, match=r"shard-toy 1\.0\.0 wants shard-core>=99, and shard-core"):
        Plugins().find("toy")
    assert "toy_plugin" not in sys.modules


BROKEN = {
    "missing library": (
        "import a_library_that_is_missing",
        "shard-toy is installed, but its module 'toy_plugin' cannot be imported "
        "(ModuleNotFoundError: No module named 'a_library_that_is_missing'); repair or uninstall shard-toy.",
    ),
    "syntax error": ("def", "its module 'toy_plugin' cannot be imported (SyntaxError: "),
    "misspelt hook": (
        HEAD + "@hookimpl\ndef shard_stratgy(name): ...\n",
        "shard-toy 1.0.0 has a plugin that does not fit the hooks of shard-core: unknown hook 'shard_stratgy'",
    ),
    "unknown hook argument": (
        HEAD + "@hookimpl\ndef shard_strategy(name, colour): ...\n",
        "shard-toy 1.0.0 has a plugin that does not fit the hooks of shard-core: ",
    ),
    "forgotten hookimpl": (
        HEAD + "def shard_strategy(name): return StrategyInfo(name=name, summary='', factory='t:T')\n",
        "shard-toy 1.0.0 offers 'toy', but its plugin 'toy_plugin' knows no strategy of that name; "
        "shard_strategy, marked @hookimpl, must return a StrategyInfo for it.",
    ),
    "wrong type": (
        HEAD + "@hookimpl\ndef shard_strategy(name): return {'name': name}\n",
        "shard-toy 1.0.0 answers shard_strategy('toy') with an object of type dict; "
        "the hook returns a StrategyInfo or None.",
    ),
    "other name": (
        HEAD + "@hookimpl\ndef shard_strategy(name): return StrategyInfo(name='t', summary='', factory='t:T')\n",
        "shard-toy 1.0.0 answers shard_strategy('toy') with the StrategyInfo of 't'; the names must be the same.",
    ),
    "hook raises": (
        HEAD + "@hookimpl\ndef shard_strategy(name): return {}[name]\n",
        "shard-toy 1.0.0 fails in shard_strategy('toy'): KeyError: 'toy'.",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), BROKEN.values(), ids=BROKEN)
def test_broken_plugin_is_named_and_breaks_nobody_else(site, text, sentence):
    install_toy(site, text=text)
    plugins = Plugins()
    with pytest.raises(BrokenBackend) as caught:
        plugins.find("toy")
    assert sentence in str(caught.value)
    installed = {each.name: each for each in plugins.installed()}
    assert sentence in installed["toy"].problem
    assert (installed["toy"].info, installed["toy"].summary) == (None, "")
    assert installed["ddp"].problem is None


def test_unavailable_says_the_backends_own_sentence(site):
    install_toy(
        site,
        words=("toy", "toy_two"),
        text=TOY
        + "@hookimpl\n"
        + "def shard_unavailable(name):\n"
        + "    return 'libtoy 3 is installed; it needs libtoy 4.' if name == 'toy' else None\n",
    )
    plugins = Plugins()
    sentence = "strategy 'toy' of shard-toy 1.0.0 cannot run here: libtoy 3 is installed; it needs libtoy 4."
    with pytest.raises(StrategyUnavailable) as caught:
        plugins.check_available("toy")
    assert str(caught.value) == sentence
    plugins.check_available("toy_two")
    listed = {each.name: (each.summary, each.problem) for each in plugins.installed()}
    assert listed["toy"] == ("toy of tests", sentence)
    assert listed["toy_two"] == ("toy_two of tests", None)


def test_unavailable_that_returns_no_sentence(site):
    install_toy(site, text=TOY + "@hookimpl\ndef shard_unavailable(name): return True\n")
    with pytest.raises(BrokenBackend, match=r"answers shard_unavailable\('toy'\) with an object of type bool;"):
        Plugins().check_available("toy")


def test_both_claims_of_one_name_are_listed_with_the_problem(site):
    install_toy(site)
    install_toy(site, module="other_plugin", name="shard-other")
    claims = [each for each in Plugins().installed() if each.name == "toy"]
    assert [each.distribution for each in claims] == ["shard-other", "shard-toy"]
    assert all("is claimed by shard-other 1.0.0 and shard-toy 1.0.0" in each.problem for each in claims)


class TestPrecisions:
    def test_found_by_name_and_made(self, site):
        site.install(
            "shard-eight",
            entries={PRECISIONS: {"fp8": "eight:make"}},
            modules={"eight": "def make(): return 'eight bits'"},
        )
        plugins = Plugins()
        assert plugins.precision_names() == ("fp8",)
        assert "eight" not in sys.modules
        assert plugins.find_precision("fp8")() == "eight bits"

    def test_unknown_name(self):
        assert Plugins().find_precision("fp8") is None

    @pytest.mark.parametrize(
        ("reference", "said"),
        [
            ("eight:male", "but that module has no such name; did you mean 'make'"),
            ("eight", "which is not of the form"),
            ("eight:", "which is not of the form"),
        ],
    )
    def test_reference_to_nothing(self, site, reference, said):
        site.install("shard-eight", entries={PRECISIONS: {"fp8": reference}}, modules={"eight": "def make(): ..."})
        with pytest.raises(BrokenBackend, match=f"shard-eight refers to '{reference}', {said}"):
            Plugins().find_precision("fp8")

    def test_claimed_twice(self, site):
        for name in ("shard-eight", "shard-octet"):
            site.install(name, entries={PRECISIONS: {"fp8": "eight:make"}})
        with pytest.raises(
            AmbiguousStrategy,
            match=r"precision 'fp8' is claimed by shard-eight .* and shard-octet .*; uninstall",
        ):
            Plugins().find_precision("fp8")

    def test_version_is_checked(self, site):
        site.install("shard-eight", requires=("shard-core<1",), entries={PRECISIONS: {"fp8": "eight:make"}})
        with pytest.raises(IncompatibleBackend, match=r"shard-eight 1\.0\.0 wants shard-core<1"):
            Plugins().find_precision("fp8")
