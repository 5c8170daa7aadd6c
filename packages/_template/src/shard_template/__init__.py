"""The strategy ``template``, a backend of Shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_template.config import TemplateConfig as TemplateConfig
    from shard_template.strategy import TemplateStrategy as TemplateStrategy

__all__ = ["TemplateConfig", "TemplateStrategy"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package imports no torch."""
    if name == "TemplateConfig":
        from shard_template.config import TemplateConfig

        return TemplateConfig
    if name == "TemplateStrategy":
        from shard_template.strategy import TemplateStrategy

        return TemplateStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
