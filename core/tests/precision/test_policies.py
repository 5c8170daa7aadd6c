from __future__ import annotations

import dataclasses

import pytest

from shard_core.errors import UnsupportedPrecision
from shard_core.precision.policies import POLICIES, resolve_name

USES = ("parameter", "compute", "reduce", "accumulate", "optimizer", "buffer")


def dtypes(name: str) -> dict[str, str]:
    return {use: getattr(POLICIES[name], use) for use in USES}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("32-true", "float32"), ("64-true", "float64"), ("bf16-true", "bfloat16"), ("16-true", "float16")],
)
def test_true_means_one_dtype_everywhere(name, dtype):
    assert dtypes(name) == dict.fromkeys(USES, dtype)
    assert (POLICIES[name].autocast, POLICIES[name].scaled) == (False, False)


@pytest.mark.parametrize(
    ("name", "dtype", "scaled"), [("bf16-mixed", "bfloat16", False), ("16-mixed", "float16", True)]
)
def test_mixed_means_float32_with_16_bit_arithmetic_under_autocast(name, dtype, scaled):
    assert dtypes(name) == dict.fromkeys(USES, "float32") | {"compute": dtype}
    assert (POLICIES[name].autocast, POLICIES[name].scaled) == (True, scaled)


def test_the_table_is_one_and_cannot_be_changed():
    assert set(POLICIES) == {"32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"}
    assert all(policy.name == name for name, policy in POLICIES.items())
    with pytest.raises(TypeError):
        POLICIES["8-true"] = POLICIES["16-true"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        POLICIES["16-true"].compute = "float32"


@pytest.mark.parametrize("name", POLICIES)
def test_full_names_mean_themselves(name):
    assert resolve_name(name) == name


@pytest.mark.parametrize(
    ("short", "name"),
    [
        (64, "64-true"),
        ("64", "64-true"),
        (32, "32-true"),
        ("32", "32-true"),
        (16, "16-mixed"),
        ("16", "16-mixed"),
        ("bf16", "bf16-mixed"),
    ],
)
def test_short_names(short, name):
    assert resolve_name(short) == name


def test_names_of_third_parties():
    assert resolve_name("fp8", others=("fp8",)) == "fp8"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "bf16-mixd",
            "there is no precision 'bf16-mixd'; did you mean 'bf16-mixed'? The precisions are: 32-true, ",
        ),
        (8, "there is no precision 8. The precisions are: "),
        (True, "there is no precision True. "),
        ("", "there is no precision ''. "),
        ("fp8", "16-true, 64-true, octet, and 64, 32, 16 and bf16 for short."),
    ],
)
def test_unknown_names_get_a_sentence(word, said):
    with pytest.raises(UnsupportedPrecision) as caught:
        resolve_name(word, others=("octet",))
    assert said in str(caught.value)
