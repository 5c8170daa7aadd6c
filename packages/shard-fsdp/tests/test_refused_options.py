"""Every word of torch's FSDP, old and new, is an option or refused with what to do instead."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateDictType,
    fully_shard,
)

from shard_core import InvalidOption, get_strategy
from shard_fsdp.config.refused_options import REFUSED

WORDS = {
    *inspect.signature(FullyShardedDataParallel.__init__).parameters,
    *inspect.signature(fully_shard).parameters,
} - {"self", "module"}


@pytest.mark.parametrize("word", sorted(WORDS))
def test_no_word_is_swallowed(word: str) -> None:
    with pytest.raises(InvalidOption, match=rf"\b{word}\b"):
        get_strategy("fsdp", **{word: object()})


@pytest.mark.parametrize("word", sorted(REFUSED))
def test_what_has_no_counterpart_is_refused_with_its_reason(word: str) -> None:
    with pytest.raises(InvalidOption) as error:
        get_strategy("hsdp", **{word: None})
    assert str(error.value) == f"strategy 'hsdp' takes no {word!r}: {REFUSED[word]}."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"limit_all_gathers": False},
            "limit_all_gathers is False; fully_shard bounds memory in any case.*: leave it at True",
        ),
        ({"use_orig_params": False}, "use_orig_params is False; .* makes no flat ones: leave it at True"),
        ({"state_dict_type": "sharde"}, "state_dict_type is 'sharde'; did you mean 'sharded'"),
        ({"state_dict_type": StateDictType.LOCAL_STATE_DICT}, "LOCAL_STATE_DICT.* it can be: sharded, full"),
        (
            {"mixed_precision": MixedPrecisionPolicy(param_dtype="bf16")},
            "mixed_precision has param_dtype='bf16'; give a floating dtype such as torch.bfloat16",
        ),
        ({"mixed_precision": MixedPrecision(reduce_dtype=torch.int8)}, "has reduce_dtype=torch.int8; give a floating"),
        ({"cpu_offload": "yes"}, "cpu_offload is 'yes'; give True, False, or torch's CPUOffload"),
    ],
)
def test_wrong_values_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("fsdp", **options)


@pytest.mark.parametrize("value", [None, False, CPUOffload(offload_params=False), OffloadPolicy()])
def test_a_strategy_does_what_its_name_says(value: Any) -> None:
    with pytest.raises(InvalidOption, match="but strategy 'fsdp_cpu_offload' stands for cpu_offload=True; leave it"):
        get_strategy("fsdp_cpu_offload", cpu_offload=value)


@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, "full"])
def test_torchs_name_for_a_form_is_understood(kind: Any) -> None:
    assert get_strategy("fsdp", state_dict_type=kind).config.state_dict_type == "full"


def test_what_is_as_clear_in_other_words_is_taken() -> None:
    given = {"sharding_strategy": "shard_grad_op", "auto_wrap_policy": nn.Linear, "ignored_states": None}
    config = get_strategy("fsdp", **given).config
    assert config == get_strategy("fsdp", sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy=(nn.Linear,)).config


def test_what_the_engine_always_does_may_be_asked_for() -> None:
    assert get_strategy("fsdp", limit_all_gathers=True, use_orig_params=True).config.use_orig_params
