"""What ranks keep in memory from program to program."""

from __future__ import annotations

import pytest

from shard_core.testing.programs.memory import Memory, resident

_HELD = []


def hold(count):
    _HELD.append(bytearray(count))
    return resident()


def followed(*looks):
    memory = Memory()
    for number, sizes in enumerate(looks):
        memory.add(20 * (number + 1), list(sizes))
    return memory


def grown(*looks):
    return followed(*looks).growth


def test_too_few_looks_tell_nothing():
    assert grown((100, 100), (200, 100), (300, 100), (400, 100)) is None


def test_what_is_loaded_once_is_no_growth():
    assert grown((0, 0), (500, 400), (900, 800), (900, 800), (900, 800), (900, 800)) == 0


def test_a_cache_that_grows_once_is_no_growth():
    assert grown((0,), (0,), (0,), (100,), (100,), (100,), (100,), (900,), (100,), (100,)) == 0


def test_the_rank_that_keeps_most_counts():
    assert grown(*((100, 100 + 40 * number) for number in range(8))) == 2


def test_what_the_compiler_keeps_is_no_growth():
    memory = Memory()
    for number in range(8):
        memory.add(20 * (number + 1), [1000 * (number // 2) + 20 * number], compiled=number % 2 == 0)
    assert memory.growth == pytest.approx(0.5, abs=0.2)  # 20 in every other look, of 20 programs each


@pytest.mark.parametrize(("kept", "looks", "grows"), [(100, 20, True), (100, 19, False), (20, 40, False)])
def test_growth_is_judged_once_caches_are_full(kept, looks, grows):
    assert followed(*([20 * number * kept * 1024] for number in range(looks))).grows is grows


@pytest.mark.timeout(120)
def test_ranks_that_keep_a_mebibyte_are_seen_to(worlds):
    world = worlds(2)
    looks = [world.run(hold, 2**20) for _ in range(8)]
    assert grown(*looks) == pytest.approx(2**20 / 20, rel=0.2)
