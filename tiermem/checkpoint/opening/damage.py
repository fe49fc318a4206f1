"""DamagedState: a saved state is not what it was when it was saved."""

from __future__ import annotations

from tiermem.swap.corruption import CorruptionError
from tiermem.swap.read_ahead import FileRange


class DamagedState(CorruptionError):
    """Bytes of a state have another checksum than its manifest says: errno EIO, where, what they are, and what to do.

    Attributes:
        filename, offset, length: the first bytes of the block, which may go on elsewhere; the checksums are of all of it.
        param, state, start, stop: the elements that they hold.
        step: the durable step that is damaged.
    """

    def __init__(
        self,
        places: list[FileRange],
        param: str,
        state: str,
        start: int,
        stop: int,
        step: int,
        written: int,
        seen: int,
        advice: str,
    ) -> None:
        first, *rest = places
        elsewhere = f" (and {len(rest)} other places, {rest[0].path}@{rest[0].offset} the next)" if rest else ""
        what = (
            f"{state} of {param}, elements {start} to {stop}, is not what was saved at step {step}: {first.num_bytes} bytes at "
            f"offset {first.offset}{elsewhere} have another CRC-32C ({seen:#010x}, saved {written:#010x}). {advice}"
        )
        super().__init__(what, str(first.path), first.offset, first.num_bytes, written, seen)
        self.param, self.state, self.start, self.stop, self.step = param, state, start, stop, step
