"""A fresh process trains without a compiler, without a word and without leaving anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import os, sys
import torch
from shard_core import get_strategy

started = []
sys.addaudithook(lambda event, args: started.append(args) if event in ("subprocess.Popen", "os.exec") else None)

def train(strategy):
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    for _ in range(2):
        strategy.backward(model(torch.ones(3, 4)).square().mean(), model)
        strategy.clip_gradients_norm(model, optimizer, 1.0)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(3, 4))

if __name__ == "__main__":
    before = dict(os.environ)
    stage = int(sys.argv[1])
    options = {"param_persistence_threshold": 0} if stage == 3 else {}
    get_strategy("deepspeed", stage=stage, devices=1, **options).launch(train)
    assert not started, started
    changed = {name for name, _ in before.items() ^ os.environ.items()}
    # The first is DeepSpeed's, the second torch's, when something of its compiler is imported.
    assert changed <= {"PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}, changed
    print("done", end="")
"""


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in "012"), "3"])
def test_a_fresh_process_says_and_leaves_nothing(tmp_path: Path, stage: str) -> None:
    home, script = tmp_path / "home", tmp_path / "train.py"
    home.mkdir()
    script.write_text(_SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "TORCH_EXT"))}
    environment |= {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(home)}
    done = subprocess.run(
        [sys.executable, str(script), stage], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done", "", 0)
    assert [path for path in home.rglob("*") if path.is_file()] == []
