"""A driver that refuses to register host memory: does its error stay behind, for torch to raise at
the next kernel?"""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("_tiermem_native")

from tiermem.swap.base.ranges import ByteRange
from tiermem.swap.memory import accelerator
from tiermem.swap.memory.accelerator import PageLock

SLOT = 4096


class Runtime:
    """As CUDA's: a call that fails returns its error and leaves it in the thread, where the next
    kernel finds it."""

    def __init__(self, most: int) -> None:
        self.most, self.registered, self.last_error = most, 0, 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802  (the driver's name)
        assert flags == 1
        if self.registered + num_bytes > self.most:
            self.last_error = 712  # an error that torch has no name for
            return self.last_error
        self.registered += num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return "part or all of the requested memory range is already mapped"

    def kernel(self, *_: object, **__: object) -> None:
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(
                f"CUDA error {error}, raised by a kernel that has nothing to do with it"
            )

    def cudart(self) -> Runtime:
        return self


def test_what_the_driver_takes_is_pinned_and_its_refusal_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(most=3 * SLOT)
    monkeypatch.setattr(accelerator, "_module_of", lambda device: runtime)
    monkeypatch.setattr(torch, "zeros", runtime.kernel)  # its fill is a kernel
    with caplog.at_level(logging.WARNING, "tiermem"):
        lock = PageLock(
            torch.device("meta"), [ByteRange(each * SLOT, SLOT) for each in range(1, 9)]
        )
    assert lock.num_bytes == runtime.registered == 3 * SLOT
    assert runtime.last_error == 0, "the next kernel would raise the driver's refusal"
    assert f"{5 * SLOT} of {8 * SLOT} bytes" in caplog.text
    assert "already mapped (error 712)" in caplog.text
    lock.close()
