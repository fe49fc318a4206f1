"""Cover: whether the parts of a manifest, put together, hold every state once and whole.

Called by whoever has written or opened all parts of one; the pieces of a (parameter, state) are looked at in the order of
their elements, those of a file in the order of their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import (
    CHECKSUM_BYTES,
    MASTER,
    WEIGHT,
    Manifest,
    ManifestError,
    Parameter,
    Part,
    Piece,
)

States = Mapping[tuple[str, str], Sequence[tuple[int, Piece]]]
"""(rank, piece) of each (parameter, state), by element."""


def cover(manifest: Manifest, parts: Sequence[Part], source: str) -> States:
    """The pieces of every state, checked.

    Raises ManifestError: a part is not of this commit, a piece of an unknown parameter, ends beyond it, overlaps another or
    leaves a hole, a state mixes kinds, a weight is missing, checksums are too many or too few.
    """
    _check_parts(manifest, parts, source)
    parameters = {each.name: each for each in manifest.parameters}
    found: dict[tuple[str, str], list[tuple[int, Piece]]] = {}
    for part in parts:
        _check_files(part, source)
        for piece in part.pieces:
            if piece.param not in parameters:
                raise ManifestError(f"{source}: part {part.rank}: {piece.param[:80]!r} is none of the parameters")
            found.setdefault((piece.param, piece.state), []).append((part.rank, piece))
    for (param, state), pieces in found.items():
        pieces.sort(key=lambda each: each[1].start)
        _check_state(parameters[param], state, pieces, source)
    _check_due(manifest, found, source)
    return found


def total_bytes(pieces: Iterable[tuple[int, Piece]]) -> int:
    """Bytes of a state."""
    return sum(piece.num_bytes for _, piece in pieces)


def _check_parts(manifest: Manifest, parts: Sequence[Part], source: str) -> None:
    for due, part in zip(manifest.parts, parts, strict=True):
        if (part.run_id, part.commit, part.rank) != (manifest.run_id, manifest.commit, due.rank):
            raise ManifestError(
                f"{source}: {due.file} is of run {part.run_id}, commit {part.commit}, rank {part.rank}; the manifest is of run "
                f"{manifest.run_id}, commit {manifest.commit}, rank {due.rank}"
            )


def _check_files(part: Part, source: str) -> None:
    end = 0
    last = -1
    for piece in sorted(part.pieces, key=lambda each: (each.file, each.offset)):
        if piece.file != last:
            last, end = piece.file, 0
        if piece.offset < end:
            raise ManifestError(
                f"{source}: part {part.rank}: {piece.state} of {piece.param[:80]!r} overlaps another piece at byte "
                f"{piece.offset} of {part.files[piece.file]}"
            )
        end = piece.offset + piece.num_bytes


def _check_state(parameter: Parameter, state: str, pieces: Sequence[tuple[int, Piece]], source: str) -> None:
    what = f"{source}: {state} of {parameter.name[:80]!r}"
    end = 0
    for rank, piece in pieces:
        if piece.start != end:
            word = "is missing" if piece.start > end else "is there twice"
            raise ManifestError(f"{what}: element {min(end, piece.start)} {word} (part {rank})")
        if piece.kind != pieces[0][1].kind:
            raise ManifestError(f"{what}: mixes {pieces[0][1].kind} and {piece.kind}")
        end += piece.numel
    if end != parameter.numel:
        raise ManifestError(f"{what}: its pieces hold {end} elements; the parameter has {parameter.numel}")
    kind = pieces[0][1].kind
    if state.split(".")[0] == WEIGHT and kinds.SCALES not in state and kind not in (parameter.dtype, kinds.PACKED):
        raise ManifestError(f"{what}: is {kind}; the parameter is {parameter.dtype}")
    if (kind == kinds.SPLIT and (state.split(".")[0] != MASTER or parameter.dtype != "bf16")) or (
        kind in (kinds.CODE_SCALES, kinds.PACKED_SCALES)
    ) != (kinds.SCALES in state):
        raise ManifestError(f"{what}: is {kind}, which no such state is")


def _check_due(manifest: Manifest, found: States, source: str) -> None:
    for parameter in manifest.parameters:
        if parameter.numel and (parameter.name, WEIGHT) not in found:
            raise ManifestError(f"{source}: {parameter.name[:80]!r} has no weight")
    for (param, state), pieces in found.items():
        if pieces[0][1].kind in (kinds.CODES, kinds.PACKED) and (param, _scales_of(state)) not in found:
            raise ManifestError(f"{source}: {state} of {param[:80]!r} is in 8 bits and has no scales")
        _check_sums(
            manifest.checksums.get(param, {}).get(state), total_bytes(pieces), f"{state} of {param[:80]!r}", source
        )
    for param, states in manifest.checksums.items():
        for state in states:
            if (param, state) not in found:
                raise ManifestError(f"{source}: checksums: {param[:80]!r} has no {state[:80]!r}")


def _check_sums(sums: Sequence[int] | None, num_bytes: int, what: str, source: str) -> None:
    due = -(-num_bytes // CHECKSUM_BYTES)
    if sums is None or len(sums) != due:
        has = "no" if sums is None else len(sums)
        raise ManifestError(f"{source}: checksums: {what} has {has} checksums; {due} are due for {num_bytes} bytes")


def _scales_of(state: str) -> str:
    base, dot, variant = state.partition(".rank")
    return f"{base}{kinds.SCALES}{dot}{variant}"
