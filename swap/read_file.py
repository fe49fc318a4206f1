"""ReadFile: somebody else's file, open to be read past the page cache.

    file    [ block ][ block ] ... [ block ][ tail ]        of 4096 bytes; what is less than one is read at once

Its bytes may be fewer than they were when it was opened: that is an error (ENODATA), never a short answer.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch

from tiermem.swap import durable
from tiermem.swap.direct import open_direct


class ReadFile:
    """An open regular file, also through a link. Raises OSError when it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd, _ = open_direct(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with durable.named(path):
                durable.check_regular(self.fd)
            self.num_bytes = os.fstat(self.fd).st_size
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Closes it; once."""
        os.close(self.fd)

    def check(self, start: int, stop: int) -> None:
        """Raises OSError (ENODATA) for bytes [start, stop) that the file has not."""
        if stop > self.num_bytes:
            raise self._past_end(start, stop, self.num_bytes)

    def read_tail(self, offset: int, num_bytes: int, buffer: torch.Tensor) -> None:
        """Reads the file's last bytes, less than a block, into a buffer of a block. Blocks; raises OSError."""
        num_read = os.preadv(self.fd, [buffer.numpy()], offset)  # type: ignore[list-item]  # numpy is a buffer
        if num_read < num_bytes:
            raise self._past_end(offset, offset + num_bytes, offset + num_read)

    def _past_end(self, start: int, stop: int, end: int) -> OSError:
        what = (
            f"bytes {start} to {stop} are asked for, the file ends at {end}: it is truncated, or another file is meant"
        )
        return OSError(errno.ENODATA, what, str(self.path))
