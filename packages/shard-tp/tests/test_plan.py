"""What a plan may say, and what is refused before anything is split."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shard_core import InvalidOption, SetupError, get_strategy
from shard_tp.plan import own_plan

#: A style that needs no other module to take what it gives.
GATHERED = "colwise_gather_output"


class Pair(nn.Module):
    def __init__(self, width: int = 8, tied: bool = False, wrapped: bool = False) -> None:
        super().__init__()
        wrap = checkpoint_wrapper if wrapped else nn.Identity().forward
        self.layers = nn.ModuleList(wrap(nn.Linear(width, width)) for _ in range(2))
        if tied:
            self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def set_up(plan: dict[str, Any], **settings: Any) -> Any:
    """Set a pair up with a plan; give each weight's local shape, or the refusal."""
    frozen = settings.pop("frozen", False)
    with get_strategy("tp", tensor_parallel_size=settings.pop("tensor_parallel_size", 2), plan=plan) as strategy:
        model = Pair(**settings)
        model.layers[0].requires_grad_(not frozen)
        try:
            model = strategy.setup_module(model)
        except (InvalidOption, SetupError) as error:
            assert not isinstance(model, FSDPModule), "refused before anything was sharded"
            return type(error).__name__, str(error)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return [
            (name, tuple(parameter.to_local().shape), parameter.requires_grad)
            for name, parameter in model.named_parameters()
        ]


def test_styles_split_what_they_declare(worlds: Any) -> None:
    for found in worlds(2).run(set_up, {"layers.0": "colwise", "layers.1": "rowwise"}):
        assert found == [
            ("layers.0.weight", (4, 8), True),
            ("layers.0.bias", (4,), True),
            ("layers.1.weight", (8, 4), True),
            ("layers.1.bias", (8,), True),
        ]


def checkpointed(plan: dict[str, Any]) -> Any:
    return set_up(plan, wrapped=True)


def test_a_layer_that_is_wrapped_for_checkpointing_is_split(worlds: Any) -> None:
    for found in worlds(2).run(checkpointed, {"layers.0": "colwise", "layers.1": "rowwise"}):
        assert [shape for _, shape, _ in found] == [(4, 8), (4,), (8, 4), (8,)]


def frozen(plan: dict[str, Any]) -> Any:
    return set_up(plan, frozen=True)


def test_frozen_parameters_stay_frozen(worlds: Any) -> None:
    for found in worlds(2).run(frozen, {"layers.*": "colwise_gather_output"}):
        assert [trained for _, _, trained in found] == [False, False, True, True]


def narrow(plan: dict[str, Any]) -> Any:
    return set_up(plan, width=7)


def other_kind(plan: dict[str, Any]) -> Any:
    model = Pair()
    model.layers[0] = nn.Bilinear(8, 8, 8)
    return refusal({"plan": plan}, model)


def tied(plan: dict[str, Any]) -> Any:
    return set_up(plan, tied=True)


@pytest.mark.parametrize(("function", "plan", "kind", "message_part"), [
    (set_up, {"layers.2": "rowwise"}, "InvalidOption", "'layers.2', which no submodule matches; did you mean"),
    (narrow, {"layers.0": GATHERED}, "SetupError", "layers.0.weight has 7 rows, which do not divide over"),
    (narrow, {"layers.1": "rowwise"}, "SetupError", "layers.1.weight has 7 columns, which do not divide over"),
    (other_kind, {"layers.0": GATHERED}, "SetupError", "'layers.0' is of type Bilinear, which torch cannot split"),
    (tied, {"layers.0": "colwise", "layers.1": "rowwise"}, "SetupError", "are one parameter and would be split"),
    (tied, {"layers.0": GATHERED}, "SetupError", "'layers.0.weight' and 'layers.1.weight' are one parameter"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused(
    worlds: Any, function: Any, plan: dict[str, Any], kind: str, message_part: str
) -> None:
    for found_kind, message in worlds(2).run(function, plan):
        assert found_kind == kind
        assert message_part in message


def test_ties_that_are_split_alike_stay_ties(worlds: Any) -> None:
    for found in worlds(2).run(tied, {"layers.*": "colwise_gather_output"}):
        assert [name for name, _, _ in found] == ["layers.0.weight", "layers.0.bias", "layers.1.bias"]


def split_unevenly(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})


def test_a_function_that_splits_what_does_not_divide_is_refused(worlds: Any) -> None:
    for found in worlds(2).run(by_hand):
        assert found == (
            "SetupError",
            "layers.0.weight has 7 rows, which do not divide over tensor_parallel_size=2; leave its module whole, or "
            "change its size.",
        )


def by_hand() -> Any:
    return refusal({"parallelize_fn": split_unevenly}, Pair(width=7))


def another(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(model)


def split_into_another() -> Any:
    return refusal({"parallelize_fn": another}, Pair())


def test_a_function_that_returns_another_model_is_refused(worlds: Any) -> None:
    for kind, message in worlds(2).run(split_into_another):
        assert kind == "SetupError"
        assert "parallelize_fn returned Sequential" in message


def alone(plan: dict[str, Any]) -> Any:
    return set_up(plan, tensor_parallel_size=1)


def test_a_group_of_one_looks_at_the_plan_too(worlds: Any) -> None:
    ((kind, message),) = worlds(1).run(alone, {"layers.2": "rowwise"})
    assert kind == "InvalidOption"
    assert "'layers.2', which no submodule matches" in message


@pytest.mark.parametrize(("options", "message_part"), [
    ({"plan": {"layers.0": "colwyse"}}, "'colwyse'; did you mean 'colwise'?"),
    ({"plan": {"layers.0": "colwise"}}, r"no module is 'rowwise' to take it; give the layer that follows 'rowwise'"),
    ({"devices": 3, "tensor_parallel_size": 2}, "needs a multiple of 2 ranks, but there are 3"),
    ({"devices": 4, "tensor_parallel_size": 2, "data_parallel_size": 1}, "needs 2 ranks, but there are 4"),
])  # fmt: skip
def test_what_no_rank_is_needed_for_is_refused_before_any_starts(options: dict[str, Any], message_part: str) -> None:
    with pytest.raises(InvalidOption, match=message_part):
        get_strategy("tp", **options)


def without_a_plan() -> Any:
    return refusal({}, Pair()), refusal({"plan": {}}, Pair())


def test_a_model_without_a_plan_is_refused_unless_asked_to_stay_whole(worlds: Any) -> None:
    for refused, accepted in worlds(2).run(without_a_plan):
        kind, message = refused
        assert kind == "SetupError"
        assert message.startswith("Pair has no tensor-parallel plan of its own; give plan={")
        assert accepted is None


def refusal(options: dict[str, Any], model: nn.Module) -> tuple[str, str] | None:
    """Set a model up; give the refusal, if there is one, and see that nothing was sharded by then."""
    with get_strategy("tp", tensor_parallel_size=2, **options) as strategy:
        try:
            strategy.setup_module(model)
        except (InvalidOption, SetupError) as error:
            assert not isinstance(model, FSDPModule)
            return type(error).__name__, str(error)
        return None


def test_torchs_own_layers_have_a_plan() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    assert own_plan(model, 2) == {
        "encoder.layers.0.linear1": "colwise",
        "encoder.layers.0.dropout": "split_dropout",
        "encoder.layers.0.linear2": "rowwise",
        "decoder.layers.0.linear1": "colwise",
        "decoder.layers.0.dropout": "split_dropout",
        "decoder.layers.0.linear2": "rowwise",
    }
    assert own_plan(model.encoder.layers[0], 2) == {
        "linear1": "colwise",
        "dropout": "split_dropout",
        "linear2": "rowwise",
    }


def evaluated() -> Any:
    """Run torch's own layers split and whole, in evaluation mode, where torch has a faster path for whole ones."""
    with get_strategy("tp", tensor_parallel_size=2) as strategy:
        strategy.seed_everything(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval()
        x = torch.randn(2, 4, 8)
        with torch.no_grad():
            whole = model(x)
            model = strategy.setup_module(model)
            torch.testing.assert_close(model(x), whole)
        return tuple(model.layers[0].linear1.weight.to_local().shape)


def test_torchs_own_layers_run_in_evaluation(worlds: Any) -> None:
    assert worlds(2).run(evaluated) == [(8, 8)] * 2


def test_heads_that_do_not_divide_are_refused() -> None:
    transformers = pytest.importorskip("transformers", reason="the optional library 'transformers' is not installed")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1
    )
    with pytest.raises(SetupError, match="num_key_value_heads=1 does not divide over tensor_parallel_size=2"):
        own_plan(transformers.LlamaForCausalLM(config), 2)


def test_a_plan_with_styles_for_experts_is_refused_by_name() -> None:
    transformers = pytest.importorskip("transformers", reason="the optional library 'transformers' is not installed")
    config = transformers.MixtralConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    with pytest.raises(SetupError, match=r"MixtralForCausalLM brings along gives 'layers\.\*\.mlp\..*does not know"):
        own_plan(transformers.MixtralForCausalLM(config), 2)
