"""Functions in a user's script, named as ``script.py:function`` and loaded by path on every rank."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shard_core.errors import InvalidOption, nearest
from shard_core.plugins.signatures import check_signature


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptFunction:
    """A function of a script; travels to the ranks.

    Attributes:
        path: The script.
        name: The function.
    """

    path: str
    name: str

    @classmethod
    def of(cls, text: str, *arguments: str) -> ScriptFunction:
        """Read ``script.py:function`` and load it.

        Args:
            text: What the user typed.
            arguments: What it will be called with, by position; a word for each, for the message.

        Raises:
            InvalidOption: If there is no such file or function, the file cannot be imported, or the function takes
                other arguments.
        """
        path, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier():
            raise InvalidOption(f"{text!r} names no function; write script.py:function.")
        if not Path(path).is_file():
            raise InvalidOption(f"there is no script {path!r}; write script.py:function.")
        found = cls(path=str(Path(path).resolve()), name=name)
        check_signature(str(found), found.load(), f"{name}({', '.join(arguments)})", *arguments)
        return found

    def __str__(self) -> str:
        """Show it as the user types it."""
        return f"{Path(self.path).name}:{self.name}"

    def load(self) -> Callable[..., Any]:
        """Return the function; its script is imported once per process, and never as ``__main__``.

        Raises:
            InvalidOption: If the script cannot be imported or has no such function.
        """
        module = _import(Path(self.path))
        found: Callable[..., Any] | None = getattr(module, self.name, None)
        if not callable(found):
            functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            hint = nearest(self.name, functions) or "."
            raise InvalidOption(f"{Path(self.path).name} has no function {self.name!r}{hint}")
        return found


def is_script(filename: str) -> bool:
    """Return whether a file is one of the scripts that were loaded.

    Args:
        filename: As it stands in tracebacks.
    """
    return _module_name(Path(filename)) in sys.modules


def _import(path: Path) -> Any:
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidOption(f"{path.name} is no Python file.")
    if str(path.parent) not in sys.path:
        # As Python does for a script it runs, so that it finds its neighbours.
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Those of the running command are not meant for the script.
    arguments = _Arguments([str(path)])
    commands, sys.argv = sys.argv, arguments
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {_cause(error)}"
        read = ", after it had read sys.argv, where a script that is imported has no arguments" * arguments.were_read
        raise InvalidOption(
            f"{path.name} {what} while it was imported{_line(error, path)}{read}; what it does when it is run belongs "
            'under `if __name__ == "__main__":`, and what it imports must be importable from here.'
        ) from error
    finally:
        sys.argv = commands
    return module


class _Arguments(list[str]):
    """The arguments of a script that has none; notes whether anybody looked for some, beyond its name."""

    were_read = False

    def __getitem__(self, key: Any) -> Any:
        self.were_read = self.were_read or key != 0
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        self.were_read = True
        return super().__iter__()

    def __len__(self) -> int:
        self.were_read = True
        return super().__len__()


def _module_name(path: Path) -> str:
    return f"shard_parity_{re.sub(r'[^0-9a-zA-Z_]', '_', str(path.with_suffix('')))}"


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


def _line(error: BaseException, path: Path) -> str:
    """Return the script's own line that led to an error."""
    frames = error.__traceback__
    line = None
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == str(path):
            line = frames.tb_lineno
        frames = frames.tb_next
    return "" if line is None else f", in line {line}"
