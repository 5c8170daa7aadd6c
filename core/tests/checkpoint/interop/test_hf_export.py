from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from fixtures.single_rank import save, state_of
from fixtures.thread_ranks import all_ranks
from torch import nn

from shard_core.checkpoint.interop.hf_export import export
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.errors import CheckpointCorrupted, CheckpointError, InvalidOption


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("count", torch.arange(3))


@pytest.fixture
def checkpoint(tmp_path):
    module = _Model()
    save(tmp_path / "c", module, torch.optim.Adagrad(module.parameters()), {"step": 3, "mean": torch.ones(2)})
    return tmp_path / "c"


def _loaded(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    return found


def _expected():
    state = _Model().state_dict()
    del state["head.weight"]
    return state


def test_weights_alone_go_out_each_tied_one_once(checkpoint, tmp_path):
    exported = export(checkpoint, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"] == list(exported.files)
    torch.testing.assert_close(_loaded(tmp_path / "out"), _expected(), rtol=0, atol=0)
    assert exported.tied == {"head.weight": "table.weight"}
    assert (exported.tensors, exported.bytes, exported.dtypes) == (4, 4 * 24 + 4 * 16 + 4 * 4 + 8 * 3, ("F32", "I64"))


def test_floats_are_cast_and_nothing_else(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out", dtype="bf16")
    wanted = {name: t.bfloat16() if t.is_floating_point() else t for name, t in _expected().items()}
    torch.testing.assert_close(_loaded(tmp_path / "out"), wanted, rtol=0, atol=0)
    with pytest.raises(InvalidOption, match=r"dtype 'bf61' is none of: fp32, .*did you mean 'bf16'\?"):
        export(checkpoint, tmp_path / "other", dtype="bf61")


def test_numbers_too_large_for_a_dtype_are_refused_and_leave_nothing(tmp_path):
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight[0, 0] = 70000.0
        module.bias[0] = float("inf")  # which float16 has
    save(tmp_path / "c", module)
    with pytest.raises(CheckpointError, match=r"'model\.weight' holds numbers too large for F16"):
        export(tmp_path / "c", tmp_path / "out", dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    export(tmp_path / "c", tmp_path / "out", dtype="bf16")


def test_files_hold_no_more_than_asked_for_and_the_index_finds_every_tensor(checkpoint, tmp_path):
    exported = export(checkpoint, tmp_path / "out", max_shard_size=90)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": exported.bytes}
    assert set(index["weight_map"].values()) == set(exported.files)
    assert [name[-23:] for name in exported.files] == [f"0000{k}-of-00003.safetensors"[-23:] for k in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "out" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - it is no dict
    sizes = [sum(t.nbytes for t in safetensors.torch.load_file(tmp_path / "out" / f).values()) for f in exported.files]
    assert sorted(sizes) == [24, 80, 96]  # the table is larger than a file may be, and alone
    torch.testing.assert_close(_loaded(tmp_path / "out"), _expected(), rtol=0, atol=0)
    with pytest.raises(InvalidOption, match="max_shard_size is 0"):
        export(checkpoint, tmp_path / "other", max_shard_size=0)


def test_what_ranks_wrote_in_parts_goes_out_whole(tmp_path):
    module = _Model()  # ranks are threads, which share one random generator

    def on_rank(coordinator):
        state = TensorState({"model": module}, {}, rank=coordinator.rank, world_size=3)
        ShardedCheckpointIO().save(tmp_path / "c", state, {}, coordinator=coordinator, information={})

    all_ranks(3, on_rank)
    export(tmp_path / "c", tmp_path / "out")
    torch.testing.assert_close(_loaded(tmp_path / "out"), _expected(), rtol=0, atol=0)


def test_one_of_several_modules_and_what_is_below_a_prefix(tmp_path):
    wrapper = nn.ModuleDict({"net": _Model(), "metric": nn.Linear(1, 1)})

    def on_rank(coordinator):
        state = state_of({"first": wrapper, "second": nn.Linear(2, 2)})
        ShardedCheckpointIO().save(tmp_path / "c", state, {}, coordinator=coordinator, information={})

    all_ranks(1, on_rank)
    with pytest.raises(InvalidOption, match=r"holds the modules 'first', 'second'; say which one .*--module"):
        export(tmp_path / "c", tmp_path / "out")
    with pytest.raises(InvalidOption, match=r"module 'first2' is not in the checkpoint; did you mean 'first'\?"):
        export(tmp_path / "c", tmp_path / "out", module="first2")
    for prefix in ("body.", "net.body.weight"):  # nothing has it, and of one name nothing would be left
        with pytest.raises(InvalidOption, match=f"no tensor of the module whose name begins with '{prefix}'"):
            export(tmp_path / "c", tmp_path / "out", module="first", prefix=prefix)
    exported = export(tmp_path / "c", tmp_path / "out", module="first", prefix="net.")
    torch.testing.assert_close(_loaded(tmp_path / "out"), _expected(), rtol=0, atol=0)
    assert exported.tied == {"head.weight": "table.weight"}
    # Its first name is outside of the prefix; it must not get lost.
    export(tmp_path / "c", tmp_path / "head", module="first", prefix="net.head.")
    torch.testing.assert_close(_loaded(tmp_path / "head"), {"weight": wrapper["net"].head.weight.detach()})


def test_the_configuration_and_the_tokenizer_go_along(checkpoint, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float32"}')
    for name in ("tokenizer.json", "tokenizer.model", "model.safetensors", "notes.json", "train.py"):
        (source / name).write_text(name)
    export(checkpoint, tmp_path / "out", dtype="bf16", config=source)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"]
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content == {"model_type": "llama", "torch_dtype": "bfloat16"}
    export(checkpoint, tmp_path / "file", config=source / "config.json")
    assert json.loads((tmp_path / "file" / "config.json").read_text())["torch_dtype"] == "float32"
    for wrong in (tmp_path / "nowhere", tmp_path, source / "train.py"):
        with pytest.raises(InvalidOption, match="the configuration"):
            export(checkpoint, tmp_path / "other", config=wrong)
    assert not (tmp_path / "other").exists()


def test_what_stands_there_is_replaced_only_where_asked_for_and_only_an_export(checkpoint, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export(checkpoint, out)  # an empty folder is nothing
    with pytest.raises(InvalidOption, match=r"exists; give another folder, or overwrite=True \(--overwrite\)"):
        export(checkpoint, out)
    export(checkpoint, out, max_shard_size=90, overwrite=True)
    assert not (out / "model.safetensors").exists()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(InvalidOption, match=r"holds 'thesis\.tex', which no export made"):
        export(checkpoint, out, overwrite=True)
    for taken in (checkpoint, checkpoint / "hf"):
        with pytest.raises(InvalidOption, match="is inside the checkpoint"):
            export(checkpoint, taken, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "out"]


def test_damage_is_named_and_leaves_nothing(checkpoint, tmp_path):
    path = checkpoint / "model-00000-of-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointCorrupted, match=r"1 tensor is damaged: 'model\.body\.bias' in"):
        export(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


_KILLED = """
import os, signal, sys
from shard_core.checkpoint.interop.hf_export import export
def die(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
export(sys.argv[1], sys.argv[2], max_shard_size=90, overwrite=True, progress=die)
"""


@pytest.mark.long
def test_an_export_that_is_killed_leaves_what_was_there(checkpoint, tmp_path):
    out = tmp_path / "out"
    for before in (None, "model.safetensors"):
        killed = subprocess.run([sys.executable, "-c", _KILLED, str(checkpoint), str(out)], check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
        assert [path.name for path in out.glob("*")] == ([before] if before else [])
        if before is None:
            export(checkpoint, out)
    torch.testing.assert_close(_loaded(out), _expected(), rtol=0, atol=0)


_MEASURED = """
import sys, threading, time
from shard_core.checkpoint.interop.hf_export import export
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) // 1024
most, over = 0, False
def watch():
    global most
    while not over:
        most = max(most, anonymous())
        time.sleep(0.001)
import torch
torch.ones(1 << 20).to(torch.bfloat16)
export(sys.argv[1] + "/small", sys.argv[1] + "/warm", dtype="bf16")
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
export(sys.argv[1] + "/large", sys.argv[1] + "/out", dtype="bf16")
over = True
thread.join()
print(most - before)
"""


@pytest.mark.long
def test_memory_is_that_of_the_largest_tensor(tmp_path):
    save(tmp_path / "small", nn.Linear(2, 2))
    layers = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(5)))  # 32 MiB each
    save(tmp_path / "large", layers)
    program = [sys.executable, "-c", _MEASURED, str(tmp_path)]
    # What is freed goes back at once, so that only what is held is seen.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(program, check=True, timeout=120, capture_output=True, text=True, env=environment)
    assert int(done.stdout) <= 40  # MiB


def test_progress_goes_up_to_the_end(checkpoint, tmp_path):
    calls = []
    exported = export(checkpoint, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert calls[-1] == (exported.bytes, exported.bytes)
