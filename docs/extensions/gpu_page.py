"""Write what was found on a device: ``python docs/extensions/gpu_page.py gpu.json``.

The page is docs/reference/gpu.md. The record of where each strategy was seen to keep the contract is installed with
core, which shows it in ``shard show``, ``shard list`` and on the pages of backends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "gpu.md"
RECORD = ROOT / "core" / "src" / "shard_core" / "plugins" / "seen.json"
KIT = "contract/kit: "
HEAD = """# On a GPU

What the acceptance program has found on a machine with a GPU. It writes after each case how it ended; this page is
made from that file, and so is the record of where each strategy was seen to run, which `shard show` prints:

```console
$ python integration_tests/gpu/accept.py --into gpu.json
$ python docs/extensions/gpu_page.py gpu.json
```

"Not reached" means that the time was up; such a case comes first in the next run into the same file. What each case
does, with the formulas, stands in the docstrings beside the program.
"""
COLUMNS = {
    "step": ("raw_ms", "ours_ms", "ratio", "interval", "tokens_per_second", "utilisation"),
    "memory": ("ours", "raw", "form", "ours_over_form"),
}
"""Figures with a column of their own; those of other sections stand in one cell, by name."""


def page(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page: a table for each section."""
    lines = [HEAD]
    for section in dict.fromkeys(key.partition("/")[0] for key in records):
        cases = {key.partition("/")[2]: each for key, each in records.items() if key.startswith(f"{section}/")}
        columns = COLUMNS.get(section, ())
        header = ["case", "result", *(name.replace("_", " ") for name in columns), "found", "on"]
        lines += [f"## {section.capitalize()}", "", _row(header), _row(["---"] * len(header))]
        for name, record in cases.items():
            figures = dict(record.get("figures", {}))
            cells = [_text(figures.pop(column)) if column in figures else "" for column in columns]
            found = "; ".join(f"{key.replace('_', ' ')}: {_text(each)}" for key, each in figures.items() if each)
            reason = f"{record['status']}: {record['reason']}" if record["reason"] else record["status"]
            where = f"{record['device']}, torch {record['torch']}, {record['date']}" if "date" in record else ""
            quick = ", quick" if record["quick"] else ""
            lines.append(_row([name, reason, *cells, found, where + quick]))
        lines.append("")
    return "\n".join(lines)


def record(
    known: Mapping[str, Mapping[str, Any]], records: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Return the record with the whole runs in which kits have found all promises kept."""
    seen = {name: {**each, "on": dict(each["on"])} for name, each in known.items()}
    for key, each in records.items():
        name = key.removeprefix(KIT)
        if key.startswith(KIT) and name in seen and each["status"] == "passed" and not each["quick"]:
            seen[name]["on"][each["on"]] = {part: each[part] for part in ("device", "torch", "date")}
    return seen


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key[:60]} {_text(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        floats = all(isinstance(each, float) for each in value)
        return (" to " if floats else ", ").join(map(_text, value))
    return str(value)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    PAGE.write_text(page(found))
    RECORD.write_text(json.dumps(record(json.loads(RECORD.read_text()), found), indent=1) + "\n")
