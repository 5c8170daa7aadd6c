"""How sizes, ages and counts read."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def size(count: float) -> str:
    """Write a number of bytes.

    Example:
        >>> size(80), size(1.5e9), size(999_950)
        ('80 B', '1.5 GB', '1.0 MB')
    """
    place = 0
    while round(count, 1) >= 1000 and place + 1 < len(_UNITS):
        count /= 1000
        place += 1
    return f"{count:.1f} {_UNITS[place]}" if place else f"{count:.0f} B"


def age(seconds: float) -> str:
    """Write how long ago something was.

    Example:
        >>> age(7384), age(0.4), age(86400 * 3.5)
        ('2 h 3 min ago', 'now', '3 d 12 h ago')
    """
    left = int(seconds)
    parts = []
    for length, unit in _SPANS:
        if left >= length:
            parts.append(f"{left // length} {unit}")
            left %= length
        elif parts:
            break
        if len(parts) == 2:
            break
    return f"{' '.join(parts)} ago" if parts else "now"


def number(count: int, noun: str) -> str:
    """Write a number of things.

    Example:
        >>> number(1, "tensor"), number(12000, "tensor")
        ('1 tensor', '12,000 tensors')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
