from __future__ import annotations

import collections
import json
import subprocess
import sys
import warnings
from datetime import timedelta

import pytest

from shard_core import get_strategy
from shard_core.errors import (
    BrokenBackend,
    InvalidOption,
    MissingCapability,
    ShardError,
    StrategyUnavailable,
    UnknownStrategy,
    UnsupportedPrecision,
)
from shard_core.precision.interface import PrecisionPolicy
from shard_core.precision.policies import POLICIES

PLUGIN = """
import dataclasses

from shard_core.options import option, options_of
from shard_core.plugins import StrategyInfo, hookimpl


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    size: "int" = option(1, "how large")
    stage: "int" = option(1, "how far")
    layers: "set[type] | None" = option(None, "which")


def info(name, **changes):
    return StrategyInfo(
        **{
            "name": name,
            "summary": "keeps its arguments",
            "factory": "toy_factory:Toy",
            "precisions": ("32-true", "bf16-mixed"),
            "options": options_of(Config),
        }
        | changes
    )


@hookimpl
def shard_strategy(name):
    return {
        "toy": info("toy"),
        "toy_far": info("toy_far", presets={"stage": 3}),
        "toy_lost": info("toy_lost", factory="toy_factory:Troy"),
        "toy_absent": info("toy_absent", factory="toy_absent:Toy"),
        "toy_late": info("toy_late", factory="toy_late:Toy"),
    }[name]


@hookimpl
def shard_unavailable(name):
    return "it is too late." if name == "toy_late" else None
"""

FACTORY = """
class Toy:
    def __init__(self, **arguments):
        self.arguments = arguments
"""

PRECISION = """
from shard_core.precision.build import build_precision


def make():
    return build_precision("bf16-true")
"""


@pytest.fixture(autouse=True)
def _toy(site, monkeypatch):
    monkeypatch.delenv("SHARD_STRATEGY", raising=False)
    monkeypatch.delenv("SHARD_OPTIONS", raising=False)
    names = ("toy", "toy_far", "toy_lost", "toy_absent", "toy_late")
    site.install(
        "shard-toy",
        entries={
            "shard.strategies": dict.fromkeys(names, "toy_plugin"),
            "shard.precisions": {"bf15": "toy_precision:make"},
        },
        modules={"toy_plugin": PLUGIN, "toy_factory": FACTORY, "toy_precision": PRECISION},
    )


def arguments_of(*args, **kwargs):
    return get_strategy(*args, **kwargs).arguments


def test_defaults_reach_the_factory():
    arguments = arguments_of("toy")
    assert arguments.pop("info").name == "toy"
    assert arguments == {
        "accelerator": "auto",
        "devices": "auto",
        "parallel_devices": None,
        "num_nodes": 1,
        "cluster_environment": None,
        "precision": "32-true",
        "collectives": None,
        "launcher": None,
        "checkpoint_io": None,
        "process_group_backend": None,
        "timeout": timedelta(minutes=30),
        "guard_timeout": timedelta(seconds=60),
    }


def test_arguments_reach_the_factory_in_one_spelling():
    arguments = arguments_of("toy", accelerator="gpu", devices="2", precision="bf16", size=7)
    assert [arguments[name] for name in ("accelerator", "devices", "precision", "size")] == [
        "cuda",
        2,
        "bf16-mixed",
        7,
    ]


@pytest.mark.parametrize(("options", "stage"), [({}, 3), ({"stage": 1}, 1)])
def test_presets_of_a_name_yield_to_the_user(options, stage):
    assert arguments_of("toy_far", **options)["stage"] == stage


def test_name_comes_from_the_environment_unless_given(monkeypatch):
    monkeypatch.setenv("SHARD_STRATEGY", "toy_far")
    assert arguments_of()["info"].name == "toy_far"
    assert arguments_of("toy")["info"].name == "toy"


@pytest.fixture
def outside(monkeypatch):
    def set_variable(**options):
        monkeypatch.setenv("SHARD_OPTIONS", json.dumps(options))

    return set_variable


def test_options_come_from_the_environment_where_the_call_leaves_them(outside):
    outside(size=7, stage=2, precision="bf16", devices=4, timeout=90, guard_timeout=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arguments = arguments_of("toy_far", size=7, devices="auto")
    assert {name: arguments[name] for name in ("size", "stage", "precision", "devices")} == {
        "size": 7,
        "stage": 2,
        "precision": "bf16-mixed",
        "devices": 4,
    }
    assert (arguments["timeout"], arguments["guard_timeout"]) == (timedelta(seconds=90), timedelta(seconds=0.5))


def test_what_the_call_gives_wins_and_is_named(outside):
    outside(size=7, precision="bf16-mixed", devices=4)
    with pytest.warns(UserWarning, match="of SHARD_OPTIONS is not used") as caught:
        arguments = arguments_of("toy", size=1, devices=2)
    assert (arguments["size"], arguments["devices"], arguments["precision"]) == (1, 2, "bf16-mixed")
    assert sorted(str(each.message) for each in caught) == [
        "devices=4 of SHARD_OPTIONS is not used: the call of get_strategy gives 2.",
        "size=7 of SHARD_OPTIONS is not used: the call of get_strategy gives 1.",
    ]
    assert {each.filename for each in caught} == {__file__}


def test_classes_come_from_the_environment_by_where_they_are(outside, monkeypatch):
    outside(layers=["collections:OrderedDict", "__main__:Block.Inner"])
    inner = type("Inner", (), {})
    monkeypatch.setattr(sys.modules["__main__"], "Block", type("Block", (), {"Inner": inner}), raising=False)
    assert arguments_of("toy")["layers"] == {collections.OrderedDict, inner}


BAD_ENVIRONMENT = {
    "unknown": (
        '{"siez": 1}',
        "SHARD_OPTIONS: strategy 'toy' has no option 'siez'; did you mean 'size'? Its options are: size, stage, ",
    ),
    "the loop's": ('{"gradient_clipping": 1.0}', "strategy 'toy' takes no 'gradient_clipping': the loop clips, with"),
    "a capability": ('{"cpu_offload": true}', "strategy 'toy' does not promise CPU_OFFLOAD"),
    "no JSON": ("size=1", "SHARD_OPTIONS is 'size=1', which is no JSON (Expecting value: line 1 column 1 (char 0))"),
    "bottomless": ("[" * 100_000, "SHARD_OPTIONS is '[[[[[[[[[["),
    "twice": ('{"size": 1, "size": 2}', "SHARD_OPTIONS gives 'size' twice in one object; say which it is to be."),
    "no object": ("[1]", """SHARD_OPTIONS is '[1]'; it must be an object of options by name, such as {"bucket_"""),
    "a value": ('{"devices": 0}', "devices is 0; allowed are 'auto'"),
    "no duration": ('{"timeout": 1e300}', "timeout is 1e+300, of type float; it must be timedelta."),
    "a word": ('{"layers": ["Block"]}', "layers is 'Block' in SHARD_OPTIONS; refer to a class or a function as 'pack"),
    "no module": ('{"layers": ["blocks:Block"]}', "refers to 'blocks:Block', but 'blocks' cannot be imported (Mod"),
    "no class": ('{"layers": ["json:Block"]}', "refers to 'json:Block', but there is no such name in 'json'."),
}


@pytest.mark.parametrize(("text", "said"), BAD_ENVIRONMENT.values(), ids=BAD_ENVIRONMENT)
def test_bad_input_from_the_environment_gets_a_sentence(monkeypatch, text, said):
    monkeypatch.setenv("SHARD_OPTIONS", text)
    with pytest.raises(ShardError) as caught:
        get_strategy("toy")
    assert said in str(caught.value)


@pytest.mark.parametrize(("name", "said"), [(None, "strategy: as"), ("", "strategy, not '': as"), (3, ", not 3: as")])
def test_no_name(name, said):
    with pytest.raises(InvalidOption) as caught:
        get_strategy(name)
    assert said in str(caught.value)
    assert "SHARD_STRATEGY" in str(caught.value)
    assert "`shard list` shows the names" in str(caught.value)


BAD_INPUT = {
    "unknown strategy": (
        {"name": "toyy"},
        UnknownStrategy,
        ["no installed package offers a strategy 'toyy'; did you mean 'toy'?", "Installed are: ", "toy_far"],
    ),
    "unknown option": (
        {"siez": 1},
        InvalidOption,
        [
            "strategy 'toy' has no option 'siez'; did you mean 'size'? Its options are: size, stage, layers, ",
        ],
    ),
    "misspelt common argument": ({"devises": 2}, InvalidOption, ["'devises'; did you mean 'devices'?"]),
    "unavailable": (
        {"name": "toy_late"},
        StrategyUnavailable,
        ["strategy 'toy_late' of shard-toy 1.0.0 cannot run here: it is too late."],
    ),
    "factory without class": (
        {"name": "toy_lost"},
        BrokenBackend,
        [
            "shard-toy refers to 'toy_factory:Troy', but that module has no such name; did you mean 'Toy'? Upgrade or "
            "uninstall shard-toy."
        ],
    ),
    "factory without module": (
        {"name": "toy_absent"},
        BrokenBackend,
        ["its module 'toy_absent' cannot be imported (ModuleNotFoundError: No module named 'toy_absent')"],
    ),
    "unknown precision": (
        {"precision": "bf16-mixd"},
        UnsupportedPrecision,
        [
            "there is no precision 'bf16-mixd'; did you mean 'bf16-mixed'? The precisions are: 32-true, ",
            "bf15",
        ],
    ),
    "precision a backend lacks": (
        {"precision": "16-mixed"},
        UnsupportedPrecision,
        ["strategy 'toy' does not honour precision '16-mixed'; it honours: 32-true, bf16-mixed."],
    ),
    "float16 without the capability": (
        {"precision": "16"},
        MissingCapability,
        ["it honours: 32-true, bf16-mixed. Whatever computes in float16 needs FP16, which it does not promise."],
    ),
    "a table with float16 without the capability": (
        {"precision": POLICIES["16-true"]},
        MissingCapability,
        ["strategy 'toy' does not honour precision '16-true'"],
    ),
    "precision of no type": ({"precision": 1.5}, InvalidOption, ["precision is 1.5, of type float"]),
    "devices": ({"devices": 0}, InvalidOption, ["devices is 0; allowed are 'auto', a number from 1 up"]),
}


@pytest.mark.parametrize(("arguments", "error", "said"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_gets_a_sentence(arguments, error, said):
    with pytest.raises(error) as caught:
        get_strategy(**({"name": "toy"} | arguments))
    assert isinstance(caught.value, ShardError)
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_precision_of_a_third_party_is_made():
    assert arguments_of("toy", precision="bf15")["precision"].policy == POLICIES["bf16-true"]


def test_precision_objects_pass_through():
    policy = PrecisionPolicy(
        name="odd",
        parameter="float32",
        compute="bfloat16",
        reduce="bfloat16",
        accumulate="float32",
        optimizer="float32",
        buffer="float32",
    )
    assert arguments_of("toy", precision=policy)["precision"] is policy


def test_everything_wrong_is_said_before_the_factory_is_imported():
    with pytest.raises(InvalidOption):
        get_strategy("toy", num_nodes=0)
    assert "toy_factory" not in sys.modules


def test_checks_need_no_torch():
    program = (
        "import sys\n"
        "from shard_core import InvalidOption, get_strategy\n"
        "try:\n"
        "    get_strategy('ddp', devices='two')\n"
        "except InvalidOption:\n"
        "    assert 'torch' not in sys.modules\n"
        "else:\n"
        "    raise AssertionError('devices=two was taken')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
