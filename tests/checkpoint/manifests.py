"""Manifests made by hand: two ranks, a parameter that is cut unevenly, an 8-bit moment, a
buffer."""

from __future__ import annotations

from saved_by_hand import states_of

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import crc32c
from tiermem.checkpoint.format.manifest import Manifest, Parameter, Part, PartFile, Piece, Pointer

RUN = "0123456789ab"


def piece(
    param: str, state: str, kind: str, start: int, numel: int, offset: int, file: int = 0
) -> Piece:
    """A piece whose bytes are what its kind asks for."""
    return Piece(param, state, kind, start, numel, file, offset, kinds.bytes_of(kind, numel))


def parts() -> list[Part]:
    """Rank 0 holds elements 0 to 99 of `w`, rank 1 the rest, and the buffer is rank 0's."""
    found = []
    for rank, (start, numel) in enumerate([(0, 100), (100, 65)]):
        pieces = [
            piece("w", "weight", "bf16", start, numel, 4096),
            piece("w", "master", "split", start, numel, 8192),
            piece("w", "exp_avg", "8bit", start, numel, 12288),
            piece("w", "exp_avg.scales", "8bit-scales", start, numel, 16384),
        ]
        if rank == 0:
            pieces.append(piece("b", "weight", "fp32", 0, 6, 0, file=1))
        found.append(
            Part(
                RUN, 3, rank, {"torch": None}, {}, ("segment.bin", "data-3.bin"), states_of(pieces)
            )
        )
    return found


def manifest(of: list[Part] | None = None) -> Manifest:
    """The manifest of these parts."""
    files = []
    for part in of or parts():
        data = part.dump()
        folder = "." if part.rank == 0 else f"../tiermem-{RUN}.1"
        files.append(
            PartFile(part.rank, folder, f"part-3-{part.rank}.json", len(data), crc32c(data))
        )
    sums = {
        "w": dict.fromkeys(["weight", "master", "exp_avg", "exp_avg.scales"], (7,)),
        "b": {"weight": (9,)},
    }
    return Manifest(
        RUN, 3, "global_step3", 3, 2, 2, tuple(files), {"name": "AdamW", "groups": []}, None, {"scale": 1024.0},
        {"global_steps": 3}, {"note": "x"}, {}, (
            Parameter("w", ("tied.w",), "parameter", (5, 33), "bf16", True, 3, 0),
            Parameter("b", (), "buffer", (2, 3), "fp32", False, 0, None),
            Parameter("empty", (), "parameter", (0, 4), "fp32", True, 0, 0),
        ), ("frozen.w",), sums, {},
    )  # fmt: skip


def pointer() -> Pointer:
    """To that manifest."""
    data = manifest().dump()
    return Pointer(
        RUN,
        3,
        f"/mnt/nvme0/tiermem-{RUN}",
        "manifest-3.json",
        len(data),
        crc32c(data),
        "global_step3",
        3,
        "abc",
        7,
    )
