"""What only ``tp`` does: meshes, groups that share a batch, norms and overflows over both axes, own plans."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shard_core import CollectiveError, InvalidOption, SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, train_under, whole_weights
from shard_tp.plugin import TP

VOCABULARY, LENGTH, BATCH, STEPS = 64, 16, 8, 5


def meshes(**options: Any) -> Any:
    with get_strategy("tp", **options) as strategy:
        mesh = strategy.device_mesh
        assert mesh is not None
        return mesh.mesh_dim_names, tuple(mesh.shape), strategy.distributed_sampler_kwargs


def asked(options: dict[str, Any]) -> Any:
    return meshes(**options)


@pytest.mark.parametrize(("options", "shape", "samplers"), [
    ({}, (1, 4), [(1, 0)] * 4),
    ({"tensor_parallel_size": 2}, (2, 2), [(2, 0), (2, 0), (2, 1), (2, 1)]),
    ({"data_parallel_size": 4}, (4, 1), [(4, rank) for rank in range(4)]),
    ({"data_parallel_size": 2, "tensor_parallel_size": 2}, (2, 2), [(2, 0), (2, 0), (2, 1), (2, 1)]),
])  # fmt: skip
def test_sizes_make_the_mesh_and_the_samplers(
    worlds: Any, options: dict[str, Any], shape: tuple[int, int], samplers: list[tuple[int, int]]
) -> None:
    found = worlds(4).run(asked, options)
    for (names, size, sampler), (replicas, rank) in zip(found, samplers, strict=True):
        assert names == ("data_parallel", "tensor_parallel")
        assert size == shape
        assert sampler == {"num_replicas": replicas, "rank": rank}


@pytest.mark.parametrize(("options", "message"), [
    ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; give a number of ranks from 1 up, or 'auto'"),
    ({"plan": "own"}, "plan is 'own'; give a dict"),
    ({"plan": {}, "parallelize_fn": print}, "plan and parallelize_fn are both given"),
    ({"parallelize_fn": 3}, "parallelize_fn is 3"),
    ({"check_batches": "yes"}, "check_batches is 'yes'; give True or False"),
    ({"unit_bytes": 0}, "unit_bytes is 0"),
    ({"reshard_after_forward": 2}, "reshard_after_forward is 2"),
    ({"reshard_after_forward": 1}, "reshard_after_forward is 1; give True, False or None"),
    ({"plan": {0: "colwise"}}, "plan names 0; a submodule's name is a str"),
])  # fmt: skip
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("tp", **options)


class Reader(nn.Module):
    """Takes its input out of whatever structure it comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, batch: Any, scale: float = 1.0) -> torch.Tensor:
        x = batch["x"][0] if isinstance(batch, dict) else batch
        return self.down(torch.tanh(self.up(x) * scale)).float().sum()


PAIR = {"up": "colwise", "down": "rowwise"}
ONES = torch.ones(2, 4)
#: What the first rank of a group is given, and what the second.
BATCHES = {
    "other values": (ONES, 2 * ONES),
    "samples in another order": (torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4).flip(0)),
    "tokens in another order": (torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4).roll(1, dims=1)),
    "more padding": (torch.zeros(2, 4), torch.zeros(3, 4)),
    "inside a structure": ({"x": [ONES]}, {"x": [-ONES]}),
}


def run_on(check: bool, what: str) -> str:
    with get_strategy("tp", tensor_parallel_size=2, plan=PAIR, check_batches=check) as strategy:
        model = strategy.setup_module(Reader())
        try:
            model(BATCHES[what][strategy.global_rank])
        except CollectiveError as error:
            return str(error)
        return "it ran"


@pytest.mark.parametrize("what", BATCHES)
def test_batches_that_differ_inside_a_group_are_refused(worlds: Any, what: str) -> None:
    for message in worlds(2).run(run_on, True, what):
        assert "ranks [0, 1] are one tensor-parallel group and were given different batches" in message


def test_the_comparison_can_be_spared(worlds: Any) -> None:
    assert worlds(2).run(run_on, False, "other values") == ["it ran", "it ran"]


def different_settings() -> str:
    with get_strategy("tp", tensor_parallel_size=2, plan=PAIR) as strategy:
        model = strategy.setup_module(Reader())
        model(ONES, scale=2.0)
        try:
            model(ONES, scale=1.0 + strategy.global_rank)
        except CollectiveError as error:
            return str(error)
        return "it ran"


def test_numbers_that_differ_inside_a_group_are_refused(worlds: Any) -> None:
    for message in worlds(2).run(different_settings):
        assert "were given different batches" in message


def groups_may_differ() -> list[float]:
    """Train two groups, each with a batch of its own, whatever kinds of tensors are in it."""
    with get_strategy("tp", tensor_parallel_size=2, plan=PAIR) as strategy:
        model = strategy.setup_module(Reader())
        data = strategy.distributed_sampler_kwargs["rank"]
        others = [torch.tensor(data), torch.zeros(0), torch.tensor([True]), torch.ones(3, dtype=torch.complex64), "any"]
        return [float(model({"x": [ONES * data, *others]})), data]


def test_batches_of_different_groups_may_differ(worlds: Any) -> None:
    first, _, third, _ = (loss for loss, _ in worlds(4).run(groups_may_differ))
    assert first != third


class Gained(Reader):
    """A parameter that no plan names, on what is split: each rank would have a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, batch: Any, scale: float = 1.0) -> torch.Tensor:
        return self.down(torch.tanh(self.up(batch)) * self.gain).sum()


def gained(plan: dict[str, str]) -> str:
    with get_strategy("tp", tensor_parallel_size=2, plan=plan) as strategy:
        model, optimizer = set_up(strategy, Gained, adamw)
        strategy.backward(model(ONES), model)
        try:
            strategy.optimizer_step(optimizer)
        except SetupError as error:
            return str(error)
        return "it stepped"


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_whole_but_meets_split_activations_is_refused(worlds: Any, size: int) -> None:
    for message in worlds(size).run(gained, PAIR):
        assert "the gradient of 'gain' differs between ranks of a tensor-parallel group" in message
    whole = {"up": "colwise_gather_output", "down": "rowwise_split_input"}
    assert worlds(size).run(gained, whole) == ["it stepped"] * size


GPT_PLAN = {"blocks.*.expand": "colwise", "blocks.*.contract": "rowwise", "head": "colwise_gather_output"}
GPT_PLAN |= {"embedding": "rowwise"}  # as tied to the head: both are split along the vocabulary


def clipped(optimizer: str, norm_type: float, clip: float) -> Any:
    options = {"tensor_parallel_size": 2, "plan": GPT_PLAN}
    return train_under("tp", options, "gpt", optimizer, steps=6, clip=clip, norm_type=norm_type)


@pytest.mark.parametrize(("norm_type", "clip"), [(1.0, 10.0), (2.0, 0.1), (math.inf, 0.01)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_norms_count_what_is_split_and_what_is_whole_once(
    worlds: Any, optimizer: str, norm_type: float, clip: float
) -> None:
    truth = oracle.train(
        lambda: models.make("gpt"),
        lambda module: models.make_optimizer(optimizer, module),
        models.batches("gpt", 6, 12),
        clip=clip,
        norm_type=norm_type,
    )
    assert min(truth.norms) > clip, "clipping must have something to do"
    # A sum of all magnitudes rounds by the order it is taken in; what is counted twice is off by per cents.
    oracle.assert_same(worlds(4).run(clipped, optimizer, norm_type, clip)[0], truth, norm=1e-5)


SPOILED, SCALED_STEPS = 1, 4


def one_infinite_shard() -> Any:
    """Train in float16; in one step, one element on one rank alone is infinite."""
    with get_strategy("tp", tensor_parallel_size=2, plan=PAIR, precision="16-mixed") as strategy:
        model, optimizer = set_up(strategy, Reader, adamw)
        stepped, changed, scales = [], [], []
        for step in range(SCALED_STEPS):
            before = whole_weights(strategy, model)
            strategy.backward(model(ONES) / 64, model)
            if step == SPOILED and strategy.global_rank == 3:
                model.up.weight.grad.to_local()[0, 0] = math.inf
            stepped.append(strategy.optimizer_step(optimizer))
            optimizer.zero_grad()
            after = whole_weights(strategy, model)
            changed.append(any(not torch.equal(before[name], weight) for name, weight in after.items()))
            scales.append(strategy.precision.state_dict()["factor"])
        return stepped, changed, scales, after


def test_one_infinite_shard_skips_the_step_on_all_ranks(worlds: Any) -> None:
    stories = worlds(4).run(one_infinite_shard)
    expected = [step != SPOILED for step in range(SCALED_STEPS)]
    for stepped, changed, scales, weights in stories:
        assert stepped == expected
        assert changed == expected
        assert scales == stories[0][2]
        assert all(torch.equal(weight, stories[0][3][name]) for name, weight in weights.items())
    before, after, *_ = stories[0][2]
    assert after == before / 2


def make(name: str) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config)
    if name == "qwen3":
        heads = {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads, intermediate_size=48))
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **dropout, intermediate_size=64))


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def train(name: str) -> oracle.Trajectory:
    losses, norms = [], []
    with get_strategy("tp", tensor_parallel_size=2, plan="auto") as strategy:
        model, optimizer = set_up(strategy, lambda: make(name), adamw)
        data = strategy.distributed_sampler_kwargs
        for tokens in samples():
            share = tokens.chunk(data["num_replicas"])[data["rank"]]
            loss = model(input_ids=share, labels=share).loss
            strategy.backward(loss, model)
            norms.append(float(strategy.clip_gradients_norm(model, optimizer, 0.5)))
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(float(strategy.all_reduce(loss.detach())))
        return oracle.Trajectory(losses=losses, norms=norms, weights=whole_weights(strategy, model))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["llama", "qwen3", "neox"])
def test_hugging_face_models_train_by_their_own_plan(worlds: Any, name: str, size: int) -> None:
    torch.manual_seed(0)
    model = make(name)
    optimizer = adamw(model)
    losses, norms = [], []
    for tokens in samples():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    truth = oracle.Trajectory(losses=losses, norms=norms, weights=dict(model.named_parameters(remove_duplicate=False)))
    for found in worlds(size).run(train, name, timeout=120):
        oracle.assert_same(found, truth)


def load_by_hand(values: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    with get_strategy("tp", tensor_parallel_size=2, plan=PAIR, unit_bytes=1) as strategy:
        model = strategy.setup_module(Reader())
        strategy.unwrap(model).load_state_dict(values)
        return model(ONES).item(), {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize("size", [2, 4])
def test_whole_tensors_are_loaded_by_hand(worlds: Any, size: int) -> None:
    plain = Reader()
    for loss, weights in worlds(size).run(load_by_hand, plain.state_dict()):
        assert loss == pytest.approx(plain(ONES).item(), rel=1e-6)
        assert all(torch.equal(weights[name], tensor) for name, tensor in plain.named_parameters())


class Gated(nn.Module):
    """Uses one of its layers, and its factor, only where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        x = self.down(torch.tanh(self.up(x)))
        return (x * self.scale if gated else x).square().mean()


def gated(sizes: dict[str, int]) -> tuple[float, dict[str, torch.Tensor]]:
    """Take a step of two micro-batches, the first of which is deferred and alone reaches the factor."""
    with get_strategy("tp", plan=PAIR, **sizes) as strategy:
        strategy.seed_everything(0)
        model = Gated()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        mine = ONES * (1 + strategy.distributed_sampler_kwargs["rank"])
        with strategy.no_backward_sync(model):
            strategy.backward(model(mine, True), model)
        strategy.backward(model(mine, False), model)
        norm = strategy.clip_gradients_norm(model, optimizer, 1.0).item()
        strategy.optimizer_step(optimizer)
        return norm, {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2), (2, 2)])
def test_what_is_whole_everywhere_is_averaged_though_a_deferred_micro_batch_alone_reached_it(
    worlds: Any, data: int, tensor: int
) -> None:
    torch.manual_seed(0)
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rank in range(data):
        ((model(ONES * (1 + rank), True) + model(ONES * (1 + rank), False)) / data).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor}
    for found, weights in worlds(data * tensor).run(gated, sizes):
        assert found == pytest.approx(norm, rel=1e-5)
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("word", TP.refused)
def test_words_from_elsewhere_are_answered(word: str) -> None:
    with pytest.raises(InvalidOption) as error:
        get_strategy("tp", **{word: 1})
    assert str(error.value) == f"strategy 'tp' takes no {word!r}: {TP.refused[word]}."
