"""The acceptance program for machines with a GPU, as far as a CPU goes: its sections, tiny, and how it keeps time."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from environments import ROOT

sys.path += [str(ROOT / "integration_tests" / "gpu"), str(ROOT / "docs" / "extensions")]

import accept  # the folder of a script is where Python looks for what stands beside it
import gpu_page
import loops
import traces
from cases import FAILED, NOT_REACHED, PASSED, SKIPPED, Case, Failed, Ledger, Machine, Skipped

from shard_core.testing.processes.script import PythonRun

Run = Callable[[Machine], Mapping[str, Any]]
Section = Callable[..., None]
TINY = Machine("cpu", quick=True)
CHEAP = {
    "step": ["fsdp bf16-mixed", "ddp kernels and waits"],
    "contract": ["gloo, two ranks on one device", "kit: single", "programs: ddp"],
    "memory": ["fsdp", "fsdp_cpu_offload"],
    "faults": ["out of memory in forward, fsdp", "out of memory in backward, ddp", "NaN", "hung NCCL collective"],
    "checkpoint": ["fsdp"],
    "several": ["scaling and overlap, ddp", "NCCL abort", "hsdp across two hosts", "tp across two hosts"],
}
TAKE_LONG = ("step", "contract", "memory", "faults", "several")
LLAMA = ("step", "several")
TINY_CASES = [(name, case) for name, cases in CHEAP.items() for case in cases]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "found.json")


@pytest.fixture
def section(monkeypatch: pytest.MonkeyPatch) -> Section:
    """Let a section consist of given cases."""

    def consist(**runs: Run) -> None:
        module: Any = ModuleType("section_made_up")
        module.cases = lambda: [Case(name, run, 1) for name, run in runs.items()]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(accept, "SECTIONS", {"made_up": 30})

    return consist


def run(names: list[str], ledger: Ledger, seconds: float = 60.0) -> None:
    accept.run_section("made_up", names, TINY, ledger, time.monotonic() + seconds)


def passing(_: Machine) -> dict[str, Any]:
    return {"figure": 1}


def failing(_: Machine) -> dict[str, Any]:
    raise Failed("the figure is too large.", {"figure": 2})


def skipping(_: Machine) -> dict[str, Any]:
    raise Skipped("it lacks something")


def dividing(_: Machine) -> dict[str, Any]:
    raise ZeroDivisionError("nothing to divide by")


def exiting(_: Machine) -> NoReturn:
    os._exit(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(*each, marks=[pytest.mark.long] * (each[0] in TAKE_LONG)) for each in TINY_CASES],
)
def test_sections_run_tiny(name: str, case: str, ledger: Ledger) -> None:
    if name in LLAMA:
        pytest.importorskip("transformers")
    ledger.write(f"{name}/{case}", accept.cases_of(name)[case].outcome(TINY))
    (record,) = ledger.records().values()
    assert record["status"] in (PASSED, SKIPPED), record
    assert record["reason"] or record["figures"]
    assert case in gpu_page.page(ledger.records())


def test_what_kits_have_found_is_what_strategies_were_seen_on() -> None:
    found = json.loads((ROOT / "integration_tests" / "gpu" / "gpu.json").read_text())
    known = json.loads(gpu_page.RECORD.read_text())
    assert gpu_page.record(known, found) == known
    assert gpu_page.PAGE.read_text() == gpu_page.page(found)
    kit = {"device": "a card", "torch": "2.11.0", "date": "2026-01-01", "on": "cuda", "quick": False, "seconds": 1.0}

    def seen(**changes: Any) -> Any:
        run = {**kit, "status": PASSED, **changes}
        return gpu_page.record(known, {gpu_page.KIT + "ddp": run})["ddp"]["on"]["cuda"]

    assert seen() == {"device": "a card", "torch": "2.11.0", "date": "2026-01-01"}
    for changes in ({"status": FAILED}, {"status": NOT_REACHED}, {"quick": True}):
        assert seen(**changes) == known["ddp"]["on"]["cuda"]  # the last that was kept


@pytest.mark.parametrize("name", accept.SECTIONS)
def test_cases_have_names_of_their_own(name: str) -> None:
    names = [case.name for case in importlib.import_module(f"section_{name}").cases()]
    assert names
    assert len(set(names)) == len(names)


def test_every_outcome_is_written_with_its_reason(section: Section, ledger: Ledger) -> None:
    section(good=passing, bad=failing, lacking=skipping, broken=dividing)
    run(["good", "bad", "lacking", "broken"], ledger)
    records = ledger.records()
    assert [each["status"] for each in records.values()] == [PASSED, FAILED, SKIPPED, FAILED]
    assert records["made_up/bad"]["figures"] == {"figure": 2}
    assert records["made_up/lacking"]["reason"] == "it lacks something"
    assert records["made_up/broken"]["reason"].startswith("ZeroDivisionError")


def test_what_is_not_reached_comes_first_next_time(section: Section, ledger: Ledger) -> None:
    section(first=passing, second=failing, third=passing)
    run(["first", "second"], ledger)
    run(["third"], ledger, seconds=-1)
    assert "made_up/third" not in ledger.records()
    order = ledger.ordered("made_up", ["first", "second", "third"], TINY, (NOT_REACHED, FAILED, PASSED))
    assert order == ["third", "second", "first"]


def test_sections_for_which_there_is_no_time_are_written_too(section: Section, ledger: Ledger) -> None:
    section(first=passing)
    accept.run_all(["made_up"], TINY, ledger, seconds=-1.0)
    assert [each["status"] for each in ledger.records().values()] == [NOT_REACHED]


def test_time_that_is_up_takes_back_no_verdict(section: Section, ledger: Ledger) -> None:
    section(first=passing)
    run(["first"], ledger)
    run(["first"], ledger, seconds=-1)
    assert ledger.records()["made_up/first"]["status"] == PASSED


def test_a_quick_run_says_nothing_about_a_full_one(section: Section, ledger: Ledger) -> None:
    section(first=passing)
    run(["first"], ledger)
    assert ledger.ordered("made_up", ["first"], TINY, [PASSED]) == ["first"]
    assert ledger.ordered("made_up", ["first"], Machine("cpu", quick=False), [PASSED]) == []


def test_cases_that_may_run_beside_one_another(
    section: Section, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    class Noted(accept.Running):
        def __init__(self, section: str, case: Case, machine: Machine) -> None:
            begun.append(case.name)
            super().__init__(section, case, machine)

    monkeypatch.setattr(accept, "Running", Noted)
    section(first=passing, beside=passing)
    module: Any = sys.modules["section_made_up"]
    module.cases = lambda: [Case("first", passing, 1), Case("beside", passing, 1, beside=True)]
    accept.run_section("made_up", ["first", "beside"], Machine("cpu", quick=False), ledger, time.monotonic() + 30)
    assert begun == ["beside", "first"]
    assert [each["status"] for each in ledger.records().values()] == [PASSED, PASSED]


def test_exits_with_one_and_a_sentence(
    section: Section, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    section(good=passing, deadly=exiting, bad=failing)
    given = ["accept.py", "--device", "cpu", "--quick", "--section", "made_up", "--into", str(ledger.path)]
    monkeypatch.setattr(sys, "argv", given)
    assert accept.main() == 1
    says = capfd.readouterr().err
    assert "made_up/deadly failed: the process ended with 3 in it" in says
    assert "made_up/bad failed: the figure is too large." in says
    section(good=passing)
    ledger.path.unlink()
    assert accept.main() == 0
    assert [each["status"] for each in json.loads(ledger.path.read_text()).values()] == [PASSED]


def test_a_case_that_passed_before_may_end_its_process(section: Section, ledger: Ledger) -> None:
    section(deadly=passing, good=passing)
    run(["deadly", "good"], ledger)
    section(deadly=exiting, good=failing)
    run(["deadly", "good"], ledger, 30)
    assert [each["status"] for each in ledger.records().values()] == [FAILED, FAILED]


def test_refuses_to_mix_quick_and_full_runs(
    section: Section, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section(good=passing)
    run(["good"], ledger)
    monkeypatch.setattr(sys, "argv", ["accept.py", "--device", "cpu", "--into", str(ledger.path)])
    with pytest.raises(SystemExit):
        accept.main()
    assert "give another file" in capsys.readouterr().err
    assert ledger.ordered("made_up", ["good"], TINY, [PASSED]) == ["good"]


def test_ends_what_runs_beyond_its_time_with_what_it_has_started(
    section: Section, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    number = tmp_path / "number"

    def starting(_: Machine) -> dict[str, Any]:
        run = PythonRun(["-c", f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(600)"])
        return {"code": run.outcome(600).exit_code}

    section(good=passing, endless=starting)
    monkeypatch.setattr(accept, "GRACE_SECONDS", 0.0)
    run(["good", "endless"], ledger, 5)
    assert {key: each["status"] for key, each in ledger.records().items()} == {"made_up/good": PASSED}
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


@pytest.mark.parametrize(("count", "low", "high"), [(2, 1, 2), (7, 1, 7), (9, 2, 8), (12, 3, 10), (15, 4, 12)])
def test_intervals_are_of_order_statistics(count: int, low: int, high: int) -> None:
    assert loops.interval([float(number) for number in range(1, count + 1)]) == (low, high)


def test_messages_beside_computing_are_measured() -> None:
    def event(name: str, begin: float, end: float) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}

    events = [event("ncclDevKernel", 0, 10), event("gemm", 2, 4), event("add", 3, 6), event("gemm", 9, 12)]
    assert traces.overlap([*events, {"cat": "cpu_op", "name": "nccl", "ts": 0}], "cuda") == pytest.approx(0.5)
    assert traces.overlap(events[1:], "cuda") is None
