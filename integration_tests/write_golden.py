"""Write the golden checkpoints that are not there yet, as this tree saves them; those that are there stay for ever.

Run it in each environment; it writes what strategies installed there can. What a new version of the format needs is
added to ``GOLDENS`` under a name of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from golden_list import FOLDER, GOLDENS, RUN
from golden_live import write, write_run, write_source

from shard_core.plugins import installed
from shard_core.testing.processes.worlds import Worlds


def main() -> None:
    """Write what is lacking and can be written here."""
    here = {each.name for each in installed()}
    worlds = Worlds()
    try:
        for golden in GOLDENS:
            if golden.strategy in here and not golden.path.exists():
                with tempfile.TemporaryDirectory() as folder:
                    source, path = Path(folder, "source"), Path(folder, "golden")
                    worlds(1).run(write_source, golden, source)
                    worlds(golden.ranks, golden.environment).run(write, golden, source, path, timeout=240)
                    shutil.move(path, golden.path)
                    print(golden.path.relative_to(FOLDER.parent))
        if not RUN.exists():
            worlds(1).run(write_run)
    finally:
        worlds.close()


if __name__ == "__main__":
    main()
