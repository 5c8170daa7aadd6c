"""Scripts run by forks of one process that has imported what nearly all of them import, which is most of their time.

As a script it is that process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# A process that has threads must not fork; nor one whose torch has asked CUDA itself for devices.
_FORKS_SAFELY = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a script ended: its exit code, None if it had to be killed, and what it printed."""

    code: int | None
    printed: str


class ForkedScripts:
    """A process that forks into scripts; what a script starts in turn imports everything itself."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | _FORKS_SAFELY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what waited in a buffer, select would not see
        )

    def run(self, script: Path, environment: Mapping[str, str], seconds: float = 280) -> Ended:
        """Run a script in its folder, as ``python SCRIPT`` does there.

        Args:
            script: It.
            environment: All its environment variables.
            seconds: When to kill it, with what it has started.

        Returns:
            How it ended.
        """
        output = script.with_suffix(".output.txt")
        request = {"script": str(script), "environment": dict(environment), "output": str(output)}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        pid = int(self._answer())
        code: int | None = None
        if select.select([self._process.stdout], [], [], seconds)[0]:
            code = int(self._answer())
        else:
            os.killpg(pid, signal.SIGKILL)
            self._answer()
        return Ended(code=code, printed=output.read_text())

    def close(self) -> None:
        """Stop the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().decode()


def serve() -> None:
    """Fork into what is asked for, one after another; return in the fork, which is to run the script."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(**request)
            return
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()


def _become(script: str, environment: dict[str, str], output: str) -> None:
    os.setsid()
    with open(os.devnull) as nothing, open(output, "w") as printed:
        for file, standard in ((nothing, 0), (printed, 1), (printed, 2)):
            os.dup2(file.fileno(), standard)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(os.path.dirname(script))
    sys.argv[:] = [script]
    sys.path[0] = os.path.dirname(script)
    sys.path[1:1] = filter(None, [environment.get("PYTHONPATH")])


if __name__ == "__main__":
    import gc
    import runpy

    gc.disable()
    import torch

    from shard_core.strategies import ddp  # noqa: F401 - for what it imports

    torch.compiler.reset()  # for what it imports: optimizers ask the compiler
    gc.freeze()
    gc.enable()
    serve()
    runpy.run_path(sys.argv[0], run_name="__main__")
