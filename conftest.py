"""What every test session here has: the option ``--quick``, and short garbage collections.

With ``--quick`` tests that start ranks or other processes leave when they try. Tests marked as slow are not begun;
there are few, since most of what takes time here starts ranks.
"""

from __future__ import annotations

import _posixsubprocess
import gc
import sys
from collections.abc import Generator
from typing import Any, NoReturn

import pytest

_STARTING = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--quick", action="store_true", help="leave out slow tests and what starts ranks or other processes"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave tests where they start ranks or another process; one that starts none runs as ever."""
    if config.getoption("quick"):
        import torch.distributed as dist

        # What makes a rank of the test's own process, and what its ranks would meet at.
        for name in ("init_process_group", "TCPStore"):
            vars(dist)[name] = _leave
        sys.addaudithook(lambda event, _: _leave() if event in _STARTING else None)
        # What multiprocessing spawns with, which is no audited event.
        _posixsubprocess.fork_exec = _leave


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests."""
    if config.getoption("quick"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_runtest_logfinish() -> None:
    """Freeze what tests have imported: every teardown looks for garbage, and in torch that takes half a second."""
    if len(sys.modules) > _modules[0]:
        _modules[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count what was left as left out, whatever the test made of it."""
    report = yield
    if _left and not report.passed:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, _left[0])
    if report.when == "teardown":
        _left.clear()
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Report tests that were left out apart from those that lack hardware."""
    return ("not quick", "", "NOT QUICK") if report.skipped and _LEFT_OUT in str(report.longrepr) else None


_LEFT_OUT = "starts ranks or another process, which --quick leaves out"
_left: list[str] = []
_modules = [0]
"""How many were imported when they were frozen."""


def _leave(*_: Any, **__: Any) -> NoReturn:
    _left.append(_LEFT_OUT)
    pytest.skip(_LEFT_OUT)
