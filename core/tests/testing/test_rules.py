"""Authors can excuse a promise with a reason, and in no other way: real pytest sessions over real strategies."""

from __future__ import annotations

import textwrap

import pytest

# The sessions below run in this process, and forget what they are the first to import: that takes seconds each.
import shard_core.testing.conformance  # noqa: F401

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

PLUGIN = """
    import dataclasses

    from shard_core.capability import Capability
    from shard_core.options import Option
    from shard_core.plugins import hookimpl
    from shard_core.strategies.plugin import SINGLE

    METADATA = {
        "doubling": {"factory": "coats:Doubling"},
        "hiding": {"factory": "coats:Coat", "capabilities": SINGLE.capabilities - {Capability.SYNC_GRADS}},
        "boasting": {"factory": "coats:Boasting"},
        "modest": {"capabilities": SINGLE.capabilities - {Capability.SYNC_GRADS}},
        "silent": {"options": (Option(name="speed", type="int", default=1, help=""),)},
    }

    @hookimpl
    def shard_strategy(name):
        return dataclasses.replace(SINGLE, name=name, **METADATA[name])
"""
COATS = """
    from shard_core.errors import MissingCapability
    from shard_core.strategies.plugin import SINGLE
    from shard_core.strategies.single import SingleStrategy

    class Coat:
        def __init__(self, *, info, **arguments):
            self.inner = SingleStrategy(info=SINGLE, **arguments)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __enter__(self):
            self.inner.__enter__()
            return self

        def __exit__(self, *exception):
            self.inner.__exit__(*exception)

    class Doubling(Coat):
        def all_reduce(self, *args, **kwargs):
            return 2 * self.inner.all_reduce(*args, **kwargs)

    class Boasting(Coat):
        def all_gather(self, tensor, group=None, sync_grads=False):
            if sync_grads:
                raise MissingCapability("not today")
            return self.inner.all_gather(tensor, group)
"""


@pytest.fixture
def strategies(site):
    """Install strategies that are right but for one thing each; most change what ``single`` does."""
    names = ("doubling", "hiding", "boasting", "modest", "silent")
    entries = {"shard.strategies": dict.fromkeys(names, "coats_plugin")}
    requires = ("shard-core>=1,<2",)
    site.install("coats", requires=requires, entries=entries, modules={"coats_plugin": PLUGIN, "coats": COATS})


@pytest.fixture
def judge(pytester):
    """Return a callable that runs a test file of an author's and returns what pytest printed."""

    def run(text, *arguments):
        pytester.makepyfile(
            "import pytest\nfrom shard_core.testing import Conformance\n\n" + textwrap.dedent(text).strip() + "\n"
        )
        quiet = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
        return pytester.runpytest(*quiet, "-rA", *arguments)

    return run


def output_of(result):
    return "\n".join([*result.outlines, *result.errlines])


WEAKENED = {
    "removed": ("test_barrier_waits = None", "TestMine sets 'test_barrier_waits'"),
    "replaced": ("def test_barrier_waits(self): pass", "TestMine sets 'test_barrier_waits'"),
    "added": ("def test_more(self): pass", "tests of your own go into another class"),
    "resized": ("def sizes(self): return ()", "TestMine sets 'sizes'"),
    "mistyped": ("world_size = (1,)", "sets 'world_size'; did you mean 'world_sizes'?"),
    "marked": ("pytestmark = pytest.mark.skip", "TestMine sets 'pytestmark'"),
    "uncollected": ("__test__ = False", "TestMine sets '__test__'"),
    "unchecked": ("def __init_subclass__(cls): pass", "TestMine sets '__init_subclass__'"),
    "wrong name": ('known_failures = {"barrier_wait": "slow"}', "is no promise; did you mean 'barrier_waits'?"),
    "no reason": ('known_failures = {"barrier_waits": " "}', "excuses 'barrier_waits' without a reason"),
    "no reasons": ('known_failures = ["barrier_waits"]', "give a dict of promises to reasons"),
    "no size": ("world_sizes = ()", "world_sizes is ()"),
    "wrong size": ("world_sizes = (0,)", "world_sizes is (0,)"),
    "no strategy": ("strategy = None", "TestMine names no strategy"),
}


@pytest.mark.parametrize(("line", "sentence"), WEAKENED.values(), ids=WEAKENED)
def test_a_class_says_no_more_than_it_may(judge, line, sentence):
    result = judge(f"""
        class TestMine(Conformance):
            strategy = "single"
            {line}
    """)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "RuleBroken" in output_of(result)
    assert sentence in output_of(result)


EXCHANGED = {
    "mixed in": (
        """
        class Mixin:
            def test_barrier_waits(self): pass

        class TestMine(Mixin, Conformance):
            strategy = "single"
        """,
        "sets 'test_barrier_waits'",
    ),
    "mixed in beside tests": (
        """
        class Mixin:
            def main_size(self): return 1

        class TestMine(Mixin, Conformance):
            strategy = "single"
        """,
        "sets 'main_size'",
    ),
    "inherited": (
        """
        class TestMine(Conformance):
            strategy = "single"

        class TestMore(TestMine):
            test_barrier_waits = None
        """,
        "TestMore sets 'test_barrier_waits'",
    ),
    "exchanged later": (
        """
        class TestMine(Conformance):
            strategy = "single"

        TestMine.test_barrier_waits = None
        """,
        "TestMine.test_barrier_waits is not the kit's",
    ),
    "marked class": (
        """
        @pytest.mark.skip
        class TestMine(Conformance):
            strategy = "single"
        """,
        "is marked 'skip'; a promise can only be excused in known_failures",
    ),
    "marked module": (
        """
        pytestmark = pytest.mark.xfail

        class TestMine(Conformance):
            strategy = "single"
        """,
        "is marked 'xfail'",
    ),
}


#: These are noticed after ranks have started.
SLOW = ("exchanged later", "marked module")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [pytest.param(*each, id=way, marks=[pytest.mark.long] if way in SLOW else []) for way, each in EXCHANGED.items()],
)
def test_a_promise_stays_what_it_is(judge, text, sentence):
    result = judge(text, "-k", "barrier_waits or version_range")
    assert result.ret in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
    assert sentence in output_of(result)


def test_a_class_that_pytest_would_pass_over_is_refused(judge):
    result = judge("""
        class MineConformance(Conformance):
            strategy = "single"
    """)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "call it TestMineConformance" in output_of(result)


def test_what_is_left_out_elsewhere_shows_in_the_last_lines(judge, pytester):
    pytester.makeconftest("""
        def pytest_collection_modifyitems(items):
            items[:] = [item for item in items if "version_range" in item.name]
    """)
    result = judge("""
        class TestMine(Conformance):
            strategy = "single"
            world_sizes = (1,)
    """)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["TestMine: 1 of * promises, at world sizes 1, 0 known failures."])


def test_a_fixture_cannot_skip_promises(judge):
    result = judge(
        """
        @pytest.fixture(autouse=True)
        def not_here():
            pytest.skip("not on this machine")

        class TestMine(Conformance):
            strategy = "single"
        """,
        *("-k", "version_range_is_declared"),
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "a promise can only be excused in known_failures" in output_of(result)


def test_an_excuse_holds_while_the_promise_is_broken(judge, strategies):
    excused = 'known_failures = {"options_are_documented": "help is being written"}'
    result = judge(
        f"""
        class TestSilent(Conformance):
            strategy = "silent"
            {excused}

        class TestSingle(Conformance):
            strategy = "single"
            {excused}
        """,
        *("-k", "options_are_documented or version_range_is_declared"),
    )
    result.assert_outcomes(passed=2, xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["XFAIL *::TestSilent::test_options_are_documented - help is being written"])
    result.stdout.fnmatch_lines(
        ["[[]XPASS(strict)] help is being written", "FAILED *::TestSingle::test_options_are_documented*"]
    )


def test_a_broken_promise_is_reported_with_its_cause(judge, strategies):
    result = judge(
        """
        class TestSilent(Conformance):
            strategy = "silent"
        """,
        *("-k", "options_are_documented"),
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["* Promise *", "Every option has a line of help,*", "Usual cause: An option is *"])


def test_what_a_promise_says_of_strategies_that_break_it(judge, strategies):
    names = ("doubling", "hiding", "boasting", "modest")
    classes = [f"class Test{name.title()}(Conformance):\n    strategy = {name!r}\n" for name in names]
    promises = "all_reduce_has_its or all_reduce_takes or wrong_operation or gathers or barrier_waits"
    result = judge("\n".join(classes), "-k", promises)
    failures = {line.split(" - ")[0].split("::", 1)[1]: line for line in result.outlines if line.startswith("FAILED")}
    assert set(failures) == {
        "TestDoubling::test_all_reduce_has_its_operations[1ranks]",
        "TestHiding::test_gathers_with_gradients[1ranks]",
        "TestBoasting::test_gathers_with_gradients[1ranks]",
    }
    assert "SYNC_GRADS is not declared" in output_of(result)
    assert "the strategy refused what it should do: not today" in output_of(result)
    # What stands on the broken promise is not judged, and what does not is.
    (skipped,) = [line for line in result.outlines if line.startswith("SKIPPED")]
    assert skipped.startswith("SKIPPED [2]")
    assert skipped.endswith("not judged: it stands on 'all_reduce_has_its_operations', which is broken")
    result.assert_outcomes(failed=3, skipped=2, passed=23)
