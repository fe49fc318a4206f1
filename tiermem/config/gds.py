"""GPUDirect Storage: why `aio.use_gds` cannot be had, found out by looking.

    a GPU that torch can use -> kvikio installed -> the cuFile driver reads without a detour -> used here

The first step that is missing is the reason. Nothing is imported before somebody asks for the key.
"""

from __future__ import annotations

import importlib
import importlib.util

__all__ = ["why_not"]


def why_not() -> str:
    """The reason, as a clause that fits after "..., but ": what is missing, and what to do."""
    if not _has_gpu():
        return "there is no GPU here that torch can use, and GPUDirect Storage reads straight into one; remove the key"
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed: install the one for your CUDA (kvikio-cu12, kvikio-cu13), or remove the key"
    detour = _detour()
    if detour:
        return f"{detour}, so reads would pass through host memory all the same; see gdscheck, or remove the key"
    return "GPUDirect is not used yet, although it works here: NVMe is read into pinned host memory; remove the key"


def _has_gpu() -> bool:
    from tiermem.swap.accelerator import find_device

    return find_device().type == "cuda"


def _detour() -> str:
    """Why kvikio or cuFile would go through host memory; empty when they would not."""
    try:
        driver = importlib.import_module("kvikio.cufile_driver")
        defaults = importlib.import_module("kvikio.defaults")
        if defaults.is_compat_mode_preferred():
            return "kvikio runs in compatibility mode (KVIKIO_COMPAT_MODE, or libcufile cannot be used)"
        if not driver.get("is_gds_available"):
            return "the cuFile driver runs in compatibility mode (nvidia-fs is not loaded, or the file system refuses)"
    except (
        ImportError,
        AttributeError,
        RuntimeError,
        OSError,
        ValueError,
    ) as error:  # kvikio's own words are the reason
        return f"kvikio cannot reach the cuFile driver ({type(error).__name__}: {error})"
    return ""
