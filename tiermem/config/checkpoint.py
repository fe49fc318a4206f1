"""`checkpoint`: what saving does where it has a choice. What is saved opens on any number of ranks, however it is asked for."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from tiermem.config.base import ConfigModel

__all__ = ["CheckpointConfig"]


class CheckpointConfig(ConfigModel):
    """`checkpoint`: saving and loading."""

    section: ClassVar[str] = "checkpoint"

    tag_validation: Literal["Warn", "Ignore", "Fail"] = "Warn"
    """Tags that differ between ranks: a warning, nothing (rank 0's is saved either way), or an error."""
    load_universal: bool = False
    """Open what was saved on another number of ranks."""
    use_node_local_storage: bool = False
    """Every node saves to storage of its own."""
    parallel_write: dict[str, Any] | None = None
    """Which ranks of a pipeline write."""
    writer: dict[str, Any] | None = None
    """How files are written."""
