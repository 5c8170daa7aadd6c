"""A checkpoint's values as people read them: nothing but what JSON has words for, and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Turn what ``values.encode`` returned into simple JSON.

    Tuples become lists, scalars numbers, infinities strings, odd keys strings; of a tensor stays its key.

    Args:
        value: The encoded value.

    Example:
        >>> plain({"betas": {"$tuple": [0.9, 0.95]}, "step": {"$scalar": ["F32", 3.0]}, "best": {"$float": "inf"}})
        {'betas': [0.9, 0.95], 'step': 3.0, 'best': 'inf'}
        >>> plain({"$dict": [[3, {"$tensor": "state.window"}]]})
        {'3': 'tensor state.window'}
    """
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if tag in ("$float", "$tuple"):
        return plain(content)
    if tag == "$scalar" and isinstance(content, list) and len(content) == 2:
        return plain(content[1])
    if tag in ("$dict", "$counter") and isinstance(content, list):
        pairs = [pair for pair in content if isinstance(pair, list) and len(pair) == 2]
        return {str(plain(key)): plain(item) for key, item in pairs}
    return f"tensor {content}" if tag == "$tensor" else {key: plain(item) for key, item in value.items()}
