"""What is built is a strategy, with the options it documents, and it has started nothing."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shard_core import plugins
from shard_core.errors import InvalidOption
from shard_core.options import Option, options_of
from shard_core.run_options import RunOptions
from shard_core.strategy import Strategy
from shard_core.testing.processes.fresh_process import ask_fresh_process
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard_core.testing.strategy_under_test import Ranks, Subject

_NO_OPTION = "no_such_option"

#: What a strategy holds, beside what ``Strategy`` defines for all of them.
_HELD = ("info", "options", "config", "precision", "collectives", "checkpoint_io")


class Construction(Suite):
    """What is built is a strategy, with the options it documents, and it has started nothing."""

    @promise(every_size=False)
    def test_options_are_documented(self) -> None:
        """Every option has a line of help, a type and a default, and the strategy takes these options and no others.

        Usual cause:
            An option is declared without help, in the constructor but not in the plugin, or with another default.
        """
        info = self.info
        for option in info.options:
            _check_option(option)
        documented = {option.name: option.default for option in info.options}
        unknown = [name for name in info.presets if name not in documented]
        assert not unknown, f"presets set {unknown}, which are no options; the options are {list(documented)}"
        config = self.subject.strategy().config
        taken = {option.name: option.default for option in options_of(type(config))}
        assert taken == documented, f"the plugin documents {documented}, but the strategy takes {taken}"
        chosen = {name: value for name, value in self.options.items() if name in documented}
        expected = type(config)(**{**info.presets, **chosen})
        assert config == expected, f"the strategy was built with {config}, it should have {expected}"
        self._check_unknown_option([*documented, *(field.name for field in dataclasses.fields(RunOptions))])

    @promise(every_size=False)
    def test_interface_is_whole(self, ranks: Ranks) -> None:
        """A strategy has every public member of Strategy, to be called as there, whatever its class.

        Usual cause:
            A member is renamed or left out, a parameter is missing or in another place, or `with` gives another object.
        """
        for rank, misfits in enumerate(ranks.run(look_at_members)):
            assert not misfits, f"rank {rank}: {'; '.join(misfits)}"

    @promise(every_size=False)
    def test_construction_starts_nothing(self) -> None:
        """Building a strategy starts nothing: no process group, no device, no thread, no random number.

        Usual cause:
            The constructor joins the ranks or asks for its device; leave that to setup_environment().
        """
        changes = ask_fresh_process("construct", pickle.dumps(self.subject).hex())
        assert not changes, f"building the strategy {' and '.join(changes)}; leave that to setup_environment()"

    def _check_unknown_option(self, known: Iterable[str]) -> None:
        owner = plugins.plugins().offer(self.strategy).distribution
        factory = plugins.load_object(self.info.factory, owner)
        message = ""
        try:
            factory(info=self.info, **{_NO_OPTION: 1})
        except InvalidOption as error:
            message = str(error)
        assert message, f"{_NO_OPTION}=1 is taken for an option; refuse it with InvalidOption"
        absent = [name for name in (_NO_OPTION, *known) if name not in message]
        assert not absent, f"the error about an unknown option does not name {absent}: {message}"


def look_at_members(subject: Subject) -> list[str]:
    """Compare what was built with what users may call, and return every difference."""
    built = subject.strategy()
    with built as entered:
        misfits = [] if entered is built else ["`with strategy as other` gives another object"]
        public = [name for name in dir(Strategy) if not name.startswith(("_", "engine_"))]
        for name in (*_HELD, *public):
            if not hasattr(built, name):
                misfits.append(f"there is no {name}")
            elif inspect.isfunction(standard := getattr(Strategy, name, None)):
                misfits += _misfits(name, standard, getattr(built, name))
        return misfits


def _misfits(name: str, standard: Callable[..., Any], mine: Any) -> list[str]:
    """List the calls of a method of ``Strategy`` that this one does not take."""
    if not callable(mine):
        return [f"{name} is no method"]
    wanted = list(inspect.signature(standard).parameters.values())[1:]
    places = [each.name for each in wanted if each.kind is each.POSITIONAL_OR_KEYWORD]
    words = [*places, *(each.name for each in wanted if each.kind is each.KEYWORD_ONLY)]
    needed = [each.name for each in wanted if each.name in places and each.default is each.empty]
    signature = inspect.signature(mine)
    try:
        bound = signature.bind(*places)
        signature.bind(**dict.fromkeys(words))
        signature.bind(*needed)
    except TypeError as error:
        return [f"{name}(): {error}"]
    swapped = [place for place in places if bound.arguments.get(place, place) != place]
    return [f"{name}() takes {place!r} in another place" for place in swapped]


def _check_option(option: Option) -> None:
    assert option.name.isidentifier(), f"option {option.name!r} is no keyword"
    assert option.type.strip(), f"option {option.name!r} has no type"
    lines = len(option.help.strip().splitlines())
    assert lines == 1, f"option {option.name!r} has {lines} lines of help; people read one"
    assert option.default is not dataclasses.MISSING, f"option {option.name!r} has no default"
