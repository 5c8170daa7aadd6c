"""A pytest plugin of the session in which rogues are judged: calls each case that is up, writes down how it went."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from shard_core.testing.rules import promise_of

_SUITES = "shard_core.testing.suites."
_LONGEST = 1500


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config.rootpath))


class _Recorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trials = json.loads((folder / "trials.json").read_text())
        self._outcomes: dict[str, dict[str, str]] = {name: {} for name in self._trials}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if not self._is_up(item)])
        items[:] = [item for item in items if self._is_up(item)]

    def _is_up(self, item: Any) -> bool:
        promise, trial = promise_of(item.obj), self._trials[item.cls.strategy]
        suite = item.obj.__module__.removeprefix(_SUITES)
        assert promise is not None
        return promise.name not in trial["spared"] and suite.startswith(tuple(trial["suites"]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        promise = promise_of(item.obj)
        assert promise is not None
        outcomes = self._outcomes[item.cls.strategy]
        outcomes.setdefault(promise.name, "")
        if report.failed:
            outcomes[promise.name] = f"{item.name}: {report.longreprtext[-_LONGEST:]}"
        elif report.skipped and not outcomes[promise.name]:
            outcomes[promise.name] = "not judged"
        return report

    def pytest_sessionfinish(self) -> None:
        (self._folder / "outcomes.json").write_text(json.dumps(self._outcomes))
