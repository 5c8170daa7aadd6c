"""What the system shows of its memory, read from files like its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from shard_core.checkpoint.save.host_memory import Room, available_memory, crowded_host


def _system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 500 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _second(folder: str, limit: str, used: int) -> dict[str, str]:
    where = f"sys/fs/cgroup/{folder}"
    return {
        f"{where}/memory.max": f"{limit}\n",
        f"{where}/memory.current": f"{used}\n",
        f"{where}/memory.stat": "active_file 9\ninactive_file 30\n",
    }


def _first(folder: str, limit: int, used: int) -> dict[str, str]:
    where = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{where}/memory.limit_in_bytes": f"{limit}\n",
        f"{where}/memory.usage_in_bytes": f"{used}\n",
        f"{where}/memory.stat": "inactive_file 9\ntotal_inactive_file 30\n",
    }


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 512_000),
        (_second(".", "400000", 100_000), 300_030),
        (_second(".", "max", 100_000), 512_000),
        ({"proc/self/cgroup": "0::/job/step\n", **_second("job/step", "max", 7), **_second("job", "5000", 4000)}, 1030),
        ({"proc/self/cgroup": "8:pids:/x\n9:memory:/job\n", **_first("job", 5000, 2000)}, 3030),
        (_first(".", 5000, 6000), 0),
    ],
)
def test_it_is_the_least_that_machine_and_groups_have_left(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    assert available_memory(_system(tmp_path, files)) == available


def test_where_nobody_tells_nothing_is_known(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_this_machine_has_some() -> None:
    available = available_memory()
    assert available is None or available > 1 << 20


def test_ranks_of_one_host_share_its_room() -> None:
    assert crowded_host([Room("a", 40, 100), Room("b", 40, None), Room("a", 50, 100)]) is None
    assert crowded_host([Room("b", 40, None), Room("a", 40, 100), Room("a", 51, 100)]) == Room("a", 91, 100)
