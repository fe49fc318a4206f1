"""`checkpoint`: what saving does where it has a choice. What is saved opens on any number of ranks, however it is asked for."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from tiermem.config.base import ConfigModel

__all__ = ["CheckpointConfig"]


def _capitalised(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value  # the reference takes any case


class CheckpointConfig(ConfigModel):
    """`checkpoint`: saving and loading."""

    section: ClassVar[str] = "checkpoint"

    tag_validation: Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(_capitalised)] = "Warn"
    """Tags that differ between ranks: a warning, nothing (rank 0's is saved either way), or an error."""
    load_universal: bool = False
    """Open what was saved on another number of ranks."""
    use_node_local_storage: bool = False
    """Every node saves to storage of its own."""
    parallel_write: dict[str, Any] | None = None
    """Which ranks of a pipeline write."""
    writer: dict[str, Any] | None = None
    """How files are written."""
