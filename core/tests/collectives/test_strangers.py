"""Who reaches the port of the ranks' store runs no code in them."""

from pathlib import Path

import pytest
from strangers import save_beside_a_stranger

from shard_core import get_strategy


@pytest.mark.parametrize("key", ["1/all", "1/0", "1/1"])
def test_a_pickle_in_the_store_is_refused_and_not_executed(tmp_path: Path, key: str) -> None:
    strategy = get_strategy("ddp", accelerator="cpu", devices=2)
    said = strategy.launch(save_beside_a_stranger, tmp_path, key)
    assert not (tmp_path / "ran").exists()
    print(said)
