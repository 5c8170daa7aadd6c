"""How Sphinx builds these pages; `python3 noxfile.py -s docs` calls it."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "Shard"
author = "The Shard authors"
release = importlib.metadata.version("shard-core")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon", "promises", "seen"]
exclude_patterns = ["_build", "examples", "extensions"]
html_theme = "furo"
html_title = "Shard"

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Without a network only names of our own can be looked up; of these all but type variables must be found.
nitpick_ignore_regex = [(r"py:.*", r"(?!shard_).*"), (r"py:class", r"shard_.*\.[A-Z]")]

# Examples in docstrings run with pytest, in the modules they stand in; here it is the pages' turn.
doctest_test_doctest_blocks = ""
