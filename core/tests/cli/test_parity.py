"""``shard parity`` on models of a user's own, under right and wrong strategies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from click.testing import CliRunner

from shard_core.cli.main import main

SCRIPT = """
import sys

import numpy as np
import torch
from torch.nn import functional


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(0.5)
        self.scale = torch.nn.Parameter(torch.randn(8), requires_grad=False)
        self.head = torch.nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, *, targets, reduction="mean"):
        print("forward")
        hidden = torch.tanh(self.drop(self.hidden(self.embedding(tokens)))) * self.scale
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten(), reduction=reduction)


def texts(**more):
    text = torch.randint(32, (6, 5))
    return {"tokens": text[:, :-1], "targets": text[:, 1:], **more}


def tied():
    return Net(), texts()


def summed():
    return Net(), texts(reduction="sum")


def ragged():
    batch = texts()
    batch["targets"] = batch["targets"].clone()
    batch["targets"][:3, 2:] = -100
    return Net(), batch


def normalised():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def linear():
    return torch.nn.Linear(4, 1)


class Noisy(Net):
    def forward(self, tokens, **more):
        return super().forward(tokens, **more) + torch.rand(())


def noisy():
    return Noisy(), texts()


def failing():
    return 1 / 0


def unseeded():
    model = linear()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(np.random.default_rng().random((1, 4))))
    return model


def another():
    return torch.nn.Linear(4, int(np.random.default_rng().integers(1, 1_000_000)))


def frozen():
    return linear().requires_grad_(False), torch.ones(2, 4)


def nothing():
    return None


def batch():
    return torch.randn(6, 4)


def five():
    return linear(), torch.randn(5, 4)


def uneven():
    return torch.randn(6, 4), torch.randn(5)


def objects():
    return torch.randn(6, 4), object()


def square(output, batch):
    return output.square().mean()


def not_finite(output, batch):
    return output.sum() * float("nan")


def failing_loss(output, batch):
    return {}["loss"]


def sized(width):
    return torch.nn.Linear(width, 1), torch.ones(6, width)


def identity(model):
    return model


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)
"""

ROGUES = """
import dataclasses

from shard_core.plugins import hookimpl
from shard_core.strategies.plugin import DDP, SINGLE

@hookimpl
def shard_strategy(name):
    return dataclasses.replace(DDP if name == "sums" else SINGLE, name=name, factory=f"rogue_strategies:{name}")
"""

ROGUE_STRATEGIES = """
import torch

from shard_core.strategies.ddp import DDPStrategy
from shard_core.strategies.single import SingleStrategy

class sums(DDPStrategy):
    def backward(self, loss, module, **more):
        super().backward(loss * self.world_size, module, **more)

class thrice(SingleStrategy):
    def backward(self, loss, module, **more):
        super().backward(loss * 3, module, **more)

class drops_one(SingleStrategy):
    def backward(self, loss, module, **more):
        super().backward(loss, module, **more)
        module.get_parameter("embedding.weight").grad[0] = 0

class half_a_norm(SingleStrategy):
    def clip_gradients_norm(self, *args, **more):
        return super().clip_gradients_norm(*args, **more) / 2

class steps_twice(SingleStrategy):
    def optimizer_step(self, optimizer, *args, **more):
        first = next(iter(optimizer.state), None) is None
        super().optimizer_step(optimizer, *args, **more)
        if not first:
            optimizer.step()
        return True

class thaws(SingleStrategy):
    def teardown(self):
        super().teardown()
    def full_parameters(self, module):
        for name, tensor in super().full_parameters(module):
            yield name, tensor + 0.001 if name == "scale" else tensor
"""
NAMES = ("sums", "thrice", "drops_one", "half_a_norm", "steps_twice", "thaws")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def rogues(site):
    site.install(
        "shard-rogues",
        requires=("shard-core>=1,<2",),
        entries={"shard.strategies": dict.fromkeys(NAMES, "rogue_plugin")},
        modules={"rogue_plugin": ROGUES, "rogue_strategies": ROGUE_STRATEGIES},
    )
    return site


def parity(script, make_model, *more, strategy="single", devices=1):
    arguments = ["parity", "--strategy", strategy, "--devices", devices, *more, f"{script}:{make_model}"]
    return CliRunner().invoke(main, list(map(str, arguments)))


def card(result):
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout.removeprefix("forward\n" * result.stdout.count("forward\n")))


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_a_right_strategy_is_right_in_every_precision(script, precision):
    result = card(parity(script, "tied", "--json", "--precision", precision))
    assert result["same"], result["says"]
    assert [row["what"].partition(",")[0] for row in result["rows"]] == [
        *["loss"] * 3, *["gradient norm"] * 3, "gradients", "weight updates",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_ranks_train_as_one_device_does(script, optimizer):
    optimizer = f"{script}:{optimizer}" if optimizer == "adagrad" else optimizer
    result = parity(script, "tied", "--optimizer", optimizer, strategy="ddp", devices=2)
    assert result.exit_code == 0, result.output
    assert "The strategy trains this model as plain PyTorch does." in result.output
    assert "weight updates" in result.output


@pytest.mark.long
def test_json_stands_alone_on_stdout_whatever_the_ranks_print(script):
    done = subprocess.run(
        [sys.executable, "-m", "shard_core", "parity", "--json", "--strategy", "ddp", f"{script}:tied"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["same"], result["first"], result["data_ranks"], result["devices"]) == (True, None, 2, 2)
    assert all(row["difference"] <= row["allowed"] for row in result["rows"])
    assert "forward" in done.stderr


def test_weights_are_the_same_whatever_make_model_draws(script):
    more = ("--batch", f"{script}:batch", "--loss", f"{script}:square", "--json")
    assert card(parity(script, "unseeded", *more))["same"]


@pytest.mark.parametrize(
    ("make_model", "more", "says"),
    [
        ("summed", [], "it is a sum over samples"),
        pytest.param("ragged", [], "different numbers of tokens", marks=pytest.mark.long),
        pytest.param(
            *("normalised", ["--train-mode", "--batch", "batch", "--loss", "square"], "SyncBatchNorm"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_loss_that_is_no_mean_is_not_the_strategys_fault(script, make_model, more, says):
    more = [f"{script}:{word}" if word in ("batch", "square") else word for word in more]
    result = parity(script, make_model, *more, strategy="ddp", devices=2)
    assert result.exit_code == 1, result.output
    output = " ".join(result.output.split())
    assert "It is not the strategy" in output
    assert says in output
    assert ("dropout draws other masks" in output) == ("--train-mode" in more)


@pytest.mark.parametrize(
    ("rogue", "first", "says", "wrong"),
    [
        ("thrice", "embedding.weight", "Every gradient is 3 times plain PyTorch's", "loss, step 2"),
        ("drops_one", "embedding.weight", "(tied to head.weight)", "gradients"),
        ("half_a_norm", None, "The gradients are right and their norm is not", "gradient norm, step 1"),
        ("steps_twice", "embedding.weight", "so it is the step", "weight updates"),
        ("thaws", "scale", "The update of 'scale' differs.", "weight updates"),
    ],
)
def test_a_wrong_strategy_is_found_out(script, rogues, rogue, first, says, wrong):
    result = parity(script, "tied", "--json", strategy=rogue)
    assert result.exit_code == 1, result.output
    found = card(result)
    assert found["first"] == first
    assert says in found["says"]
    assert wrong in {row["what"] for row in found["rows"] if not row["same"]}


@pytest.mark.long
def test_gradients_that_are_summed_over_ranks_are_named(script, rogues, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(rogues.folder))
    result = parity(script, "tied", strategy="sums", devices=2)
    assert result.exit_code == 1, result.output
    assert "they are summed over the 2 data ranks" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("make_model", "more", "says"),
    [
        ("tied", ["--strategy", "dpd"], "did you mean 'ddp'?"),
        ("tied", ["--precision", "32-tru"], "did you mean '32-true'?"),
        ("tied", ["--option", "speed=3"], "has no option 'speed'"),
        ("tied", ["--option", "speed"], "is no assignment"),
        ("tied", ["--optimizer", "adam"], "did you mean 'adamw'?"),
        ("tide", [], "script.py has no function 'tide'; did you mean 'tied'?"),
        ("nothing", [], "script.py:nothing returned NoneType; it must return a torch.nn.Module"),
        ("frozen", [], "no parameter that is trained"),
        ("linear", [], "returns a model without a batch"),
        ("linear", ["--batch", "batch"], "or give --loss"),
        ("linear", ["--batch", "uneven"], "batch[0] has 6 samples and batch[1] has 5"),
        ("linear", ["--batch", "objects"], "batch[1] is of type builtins.object"),
        ("linear", ["--batch", "nothing"], "returns a model without a batch"),
        ("linear", ["--batch", "batch", "--loss", "not_finite"], "in plain PyTorch the loss is nan"),
        ("linear", ["--batch", "batch", "--loss", "square", "--optimizer", "identity"], "must return an optimizer"),
        ("noisy", [], "forward draws random numbers, in eval mode too"),
        ("another", ["--batch", "batch", "--loss", "square"], "makes another model each time"),
        ("sized", [], "script.py:sized is called as sized(), but sized(width) does not fit: missing a required arg"),
        ("linear", ["--batch", "identity"], "is called as identity(), but identity(model) does not fit: missing"),
        ("linear", ["--batch", "batch", "--loss", "identity"], "is called as identity(output, batch), but identity(mo"),
        ("tied", ["--optimizer", "square"], "is called as square(model), but square(output, batch) does not fit"),
    ],
)
def test_what_cannot_be_compared_gets_a_sentence(script, make_model, more, says):
    functions = ("batch", "uneven", "objects", "nothing", "square", "not_finite", "identity")
    more = [f"{script}:{word}" if word in functions else word for word in more]
    result = parity(script, make_model, *more)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_what_the_users_functions_raise_is_shown_with_its_traceback(script):
    result = parity(script, "linear", "--batch", f"{script}:batch", "--loss", f"{script}:failing_loss")
    assert result.exit_code == 2
    assert "Traceback (most recent call last):" in result.stderr
    assert "Error: nothing could be compared: KeyError: 'loss'" in result.stderr


def test_a_traceback_begins_in_the_users_script(script):
    result = parity(script, "failing")
    assert result.exit_code == 2
    first = result.stderr.partition("Traceback (most recent call last):")[2].strip().splitlines()[0]
    assert first.startswith(f'File "{script}"')
    assert "Error: nothing could be compared: ZeroDivisionError: division by zero" in result.stderr


@pytest.mark.long
def test_what_is_found_wrong_on_a_rank_gets_a_sentence_too(script):
    asked = ("--loss", f"{script}:square", "--option", "process_group_backend=glo")
    result = parity(script, "linear", "--batch", f"{script}:batch", *asked, strategy="ddp", devices=2)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: torch has no process group backend 'glo' here; did you mean 'gloo'?")
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_a_batch_that_does_not_divide_gets_a_sentence(script):
    result = parity(script, "five", "--loss", f"{script}:square", strategy="ddp", devices=2)
    assert result.exit_code == 2
    assert "the batch has 5 samples, which do not divide over 2 data ranks" in result.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import sys; sys.exit(3)", "program.py called sys.exit(3) while it was imported, in line 1"),
        ("from shard_core import nowhere", "program.py raised ImportError"),
        ("1 / 0", 'belongs under `if __name__ == "__main__":`'),
        ("import sys; open(sys.argv[1])", "in line 1, after it had read sys.argv, where a script that is imported has"),
        (
            "import argparse; p = argparse.ArgumentParser(); p.add_argument('data'); p.parse_args()",
            "called sys.exit(2) while it was imported, in line 1, after it had read sys.argv, where",
        ),
    ],
)
def test_a_script_that_cannot_be_imported_gets_a_sentence(tmp_path, line, says):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(line))
    result = parity(path, "make_model")
    assert result.exit_code == 2
    assert says in result.stderr


def test_there_must_be_a_script(tmp_path):
    for text in (f"{tmp_path}/nowhere.py:make", "make_model", "script.py:"):
        result = CliRunner().invoke(main, ["parity", "--strategy", "single", "--devices", "1", text])
        assert result.exit_code == 2
        assert "write script.py:function" in result.stderr
