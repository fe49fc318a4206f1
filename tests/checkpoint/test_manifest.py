"""Is a manifest read back as it was written, and is everything that is wrong with one an error that
says what?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from manifests import manifest, parts, piece, pointer
from saved_by_hand import pieces_of, states_of

from tiermem.checkpoint.format import fields as fields_of_files
from tiermem.checkpoint.format.fields import ManifestError, crc32c, seal, unseal
from tiermem.checkpoint.format.finding import cover
from tiermem.checkpoint.format.manifest import (
    Parameter,
    Part,
    PartState,
    Piece,
    check_parameters,
    parse_manifest,
    parse_part,
    parse_pointer,
)


def changed(data: bytes, change: Any) -> bytes:
    """The same file with its content changed and its crc right again."""
    content = json.loads(data)
    del content["crc32c"]
    change(content)
    return seal(content)


def put(*path: Any) -> Any:
    """A change: the last of `path` in the place that the others name."""
    *places, name, value = path

    def change(content: Any) -> None:
        for place in places:
            content = content[place]
        content[name] = value

    return change


def test_crc_is_that_of_the_standard() -> None:
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_what_is_written_is_read_back() -> None:
    assert parse_manifest(manifest().dump(), "m") == manifest()
    assert [parse_part(part.dump(), "p") for part in parts()] == parts()
    assert parse_pointer(pointer().dump(), "t") == pointer()
    more = dataclasses.replace(parts()[0], extra_state={"m._extra_state": [1]})
    assert parse_part(more.dump(), "p") == more
    assert b"extra_state" not in parts()[0].dump()  # readers from before the field open it
    placed = dataclasses.replace(pointer(), witness="7-9")
    assert parse_pointer(placed.dump(), "t") == placed
    assert b"witness" not in pointer().dump()
    found = cover(manifest(), parts(), "m")
    assert [found.files[piece.file][0] for piece in found.pieces("w", "weight")] == [0, 1]


@pytest.mark.parametrize("cut", [0, 1, 20, 300, -1, -2, -20])
def test_a_truncated_file_is_refused(cut: int) -> None:
    with pytest.raises(ManifestError, match=r"m\.json"):
        parse_manifest(manifest().dump()[:cut], "m.json")


def test_every_flipped_bit_is_noticed() -> None:
    data = pointer().dump()
    for place in range(len(data) - 1):
        flipped = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        with pytest.raises(ManifestError):
            parse_pointer(flipped, "t")


WRONG = [
    (put("format", "other"), "format"),
    (
        put("version", 3),
        "version 3 of the format; this tiermem reads version 2: open it with a newer one",
    ),
    (put("version", True), "version"),
    (put("run_id", ""), "run_id"),
    (put("commit", -1), "commit"),
    (put("commit", 1 << 63), "commit"),
    (put("commit", 1.0), "commit"),
    (put("tag", 5), "tag"),
    (put("step", None), "step"),
    (put("world", 0), "world"),
    (put("world", 1 << 40), "world"),
    (put("world", 4), "parts: 2 are listed"),
    (put("world", 3), "divisor of world=3"),
    (put("num_shards", 3), "num_shards"),
    (put("parts", {}), "parts"),
    (put("parts", 1, "rank", 0), "parts"),
    (put("parts", 1, "bytes", "9"), r"parts\[1\]: bytes"),
    (put("parts", 1, "crc32c", "zz"), "crc32c"),
    (put("parts", 1, "folder", "a\0b"), "folder"),
    (put("parts", 1, "folder", "."), None),
    (
        lambda content: content["parts"][1].update(folder=".", file="part-3-0.json"),
        "a path is listed twice",
    ),
    (put("optimizer", {"$": "eval", "value": "1"}), "optimizer"),
    (
        put("client_state", {"$": "tensor", "dtype": "float32", "shape": [1 << 40], "value": ""}),
        "client_state",
    ),
    (
        put("client_state", {"$": "tensor", "dtype": "fp32", "shape": [1 << 40], "value": ""}),
        "bytes, in base64",
    ),
    (put("parameters", 0, "shape", [-1]), "shape"),
    (put("parameters", 0, "shape", [1 << 40, 1 << 40]), "shape"),
    (put("parameters", 0, "shape", [1] * 65), "shape"),
    (put("parameters", 0, "shape", [0, 1 << 62, 1 << 62]), "shape"),
    (put("parameters", 0, "dtype", "pickle"), "dtype"),
    (put("parameters", 0, "role", "x"), "role"),
    (put("parameters", 0, "trainable", 1), "trainable"),
    (put("parameters", 0, "num_steps", -3), "num_steps"),
    (put("parameters", 0, "group", "0"), "group"),
    (put("parameters", 0, "name", "b"), "listed twice"),
    (put("parameters", 0, "aliases", ["b"]), "listed twice"),
    (put("parameters", 0, "aliases", ["x", "x"]), "listed twice"),
    (put("parameters", 0, "other", 1), "no such field"),
    (put("excluded", ["w"]), "excluded"),
    (put("checksums", {"v": {}}), "none of the parameters"),
    (put("checksums", "w", "weight", [1 << 32]), "weight"),
    (put("checksums", "w", "weight", [True]), "weight"),
    (put("version", 1), "choices is due since version 2 of the format, and not in version 1"),
    (put("choices", {"overlap": "backward", "compute_dtype": "fp32"}), None),
    (put("choices", {"streamed_ratio": "0.5"}), None),
    (
        put("choices", {"streamed_ratio": "1.5"}),
        "choices: '1.5' is unknown: it was written by a newer tiermem",
    ),
    (
        put("choices", {"streamed_ratio": "half"}),
        "choices: could not convert string to float: 'half'",
    ),
    (
        put("choices", {"overlap": "auto"}),
        "choices: 'auto' is unknown: it was written by a newer tiermem",
    ),
    (
        put("choices", {"layout": "rows"}),
        "choices: 'layout' is unknown: it was written by a newer tiermem",
    ),
    (
        put("choices", {"compute_dtype": "fp8"}),
        "choices: 'fp8' is unknown: it was written by a newer tiermem",
    ),
    (put("choices", []), "choices is a list"),
    (put("choices", None), "choices is due since version 2"),
    (lambda content: content.pop("choices"), "choices is due since version 2"),
    (
        put("parameters", 0, "at_rest", "fp4"),
        "at_rest: 'fp4' is unknown: it was written by a newer tiermem",
    ),
    (put("surplus", 1), "no such field"),
    (lambda content: content.pop("step"), "step is missing"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_each_wrong_field_of_a_manifest_is_named(change: Any, said: str | None) -> None:
    data = changed(manifest().dump(), change)
    if said is None:
        parse_manifest(data, "m")
        return
    with pytest.raises(ManifestError, match=said):
        parse_manifest(data, "m")


WRONG_PARTS = [
    (put("files", ["segment.bin", "segment.bin"]), "listed twice"),
    (put("files", "segment.bin"), "files"),
    (put("states", 0, "kind", "pickle"), "kind"),
    (put("states", 0, "pieces", {}), "pieces"),
    (put("states", 0, "other", 1), "no such field"),
    (put("states", 1, "state", "weight"), "listed twice"),
    (put("states", 0, "pieces", 0, 2, 2), "file is 2"),
    (put("states", 0, "pieces", 0, 1, 0), "no element"),
    (put("states", 0, "pieces", 0, 0, (1 << 63) - 1), "beyond"),
    (put("states", 0, "pieces", 0, 3, (1 << 63) - 1), "beyond"),
    (put("states", 0, "pieces", 0, 0, True), r"states\[0\]: pieces\[0\]\[0\] is True"),
    (put("states", 0, "pieces", 0, [0, 1, 0]), r"states\[0\]: pieces\[0\]\[3\] is missing"),
    (put("rank", "0"), "rank"),
    (put("rng", {"$": "object"}), "rng"),
]


@pytest.mark.parametrize(("change", "said"), WRONG_PARTS)
def test_each_wrong_field_of_a_part_is_named(change: Any, said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        parse_part(changed(parts()[0].dump(), change), "p")


def test_pieces_that_overlap_leave_holes_or_belong_to_nobody_are_refused() -> None:
    both = parts()

    def with_piece(index: int, **fields: Any) -> list[Any]:
        pieces = list(pieces_of(both[1]))
        pieces[index] = pieces[index]._replace(**fields)
        states = (
            PartState(p.param, p.state, p.kind, [(p.start, p.numel, p.file, p.offset)])
            for p in pieces
        )
        return [both[0], dataclasses.replace(both[1], states=tuple(states))]

    for fields, said in [
        ({"start": 99}, "there twice"),
        ({"start": 101}, "missing"),
        ({"numel": 64, "num_bytes": 128}, "hold 164 elements"),
        ({"param": "v"}, "none of the parameters"),
        ({"kind": "fp16"}, "mixes"),
        ({"offset": 8193}, "overlaps"),
        ({"state": "master"}, "hold 100 elements"),
    ]:
        with pytest.raises(ManifestError, match=said):
            cover(manifest(), with_piece(0, **fields), "m")
    lone = dataclasses.replace(both[0], states=both[0].states[:-1])
    with pytest.raises(ManifestError, match="has no weight"):
        cover(manifest(), [lone, both[1]], "m")
    with pytest.raises(ManifestError, match="of run"):
        cover(manifest(), [dataclasses.replace(both[0], commit=2), both[1]], "m")
    assert piece("w", "weight", "bf16", 0, 3, 0).num_bytes == 6


@pytest.mark.parametrize(
    ("at_rest", "said"), [("nf4", "is bf16; the parameter is nf4"), (None, None)]
)
def test_a_form_at_rest_that_the_weight_does_not_have_is_refused(
    at_rest: str | None, said: str | None
) -> None:
    weight, *others = manifest().parameters
    changed = dataclasses.replace(
        manifest(), parameters=(dataclasses.replace(weight, at_rest=at_rest), *others)
    )
    with pytest.raises(ManifestError, match=said) if said else contextlib.nullcontext():
        cover(changed, parts(), "m")


def test_states_that_lack_scales_or_have_sums_alone_are_refused() -> None:
    both = parts()

    def with_pieces(change: Callable[[Piece], Piece | None]) -> list[Part]:
        return [
            dataclasses.replace(
                part,
                states=states_of([new for p in pieces_of(part) if (new := change(p)) is not None]),
            )
            for part in both
        ]

    with pytest.raises(ManifestError, match="exp_avg of 'w' is quantised and has no scales"):
        cover(manifest(), with_pieces(lambda p: None if p.state == "exp_avg.scales" else p), "m")
    with pytest.raises(
        ManifestError, match="exp_avg of 'w': is 8bit-scales, which no such state is"
    ):
        cover(
            manifest(),
            with_pieces(
                lambda p: (
                    p._replace(kind="8bit-scales", num_bytes=2, offset=20480)
                    if p.state == "exp_avg"
                    else p
                )
            ),
            "m",
        )
    with pytest.raises(ManifestError, match="checksums: 'b' has no 'master'"):
        cover(
            dataclasses.replace(
                manifest(),
                checksums={**manifest().checksums, "b": {"weight": (9,), "master": (1,)}},
            ),
            both,
            "m",
        )


def test_deep_nesting_and_strange_json_are_refused() -> None:
    for body in (
        b'{"a":' + b"[" * 100_000,
        b'{"a":NaN',
        b'{"a":1e999',
        b'{"a":1,"a":2',
        b'{"a":"\xff"',
        b'{"a":' + b"9" * 10_000,
    ):
        sealed = body + b',"crc32c":"%08x"}\n' % crc32c(body)
        with pytest.raises(ManifestError, match="m"):
            parse_manifest(sealed, "m")


class Compared(str):
    """A string that counts how often it is compared with another: work, without a clock."""

    num_times = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.num_times += 1
        return str.__eq__(self, other)


def test_parts_are_put_together_in_linear_time() -> None:
    names = [Compared(f"w{number}") for number in range(1000)]
    kinds_of = {"weight": "bf16", "exp_avg": "8bit", "exp_avg.scales": "8bit-scales"}
    pieces = [
        piece(name, state, kind, 0, 8, 64 * (3 * number + place))
        for number, name in enumerate(names)
        for place, (state, kind) in enumerate(kinds_of.items())
    ]
    part = dataclasses.replace(parts()[0], files=("segment.bin",), states=states_of(pieces))
    whole = dataclasses.replace(
        manifest([part]), parameters=tuple(Parameter(name, (), "parameter", (8,), "bf16", True, 1, 0) for name in names),
        checksums={name: dict.fromkeys(kinds_of, (1,)) for name in names},
    )  # fmt: skip
    Compared.num_times = 0
    assert len(cover(whole, [part], "m").numbers) == 3 * len(names)
    assert Compared.num_times < 30 * len(names)


def test_a_name_that_is_listed_twice_is_found_in_linear_time() -> None:
    names = [Compared(f"w{number}") for number in range(2000)]
    Compared.num_times = 0
    with pytest.raises(ManifestError, match="'w1999' is listed twice"):
        check_parameters((), [*names, Compared("w1999")])
    assert Compared.num_times < 20 * len(names)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("filler", [b"[]", b'{"a":1}', b'"ab"', b"999", b"[999,999,999,999]"])
def test_what_is_made_of_a_file_is_bounded_by_its_size(filler: bytes) -> None:
    body = b'{"x":[' + b",".join([filler] * ((1 << 20) // (len(filler) + 1))) + b"]"
    data = body + b',"crc32c":"%08x"}\n' % crc32c(body)
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError, match="format is missing"):
            parse_manifest(data, "m")
        assert tracemalloc.get_traced_memory()[1] < 26 * len(data)
    finally:
        tracemalloc.stop()


def test_a_file_of_a_checkpoint_is_not_copied_to_be_checked() -> None:
    data = seal({"text": "x" * (1 << 20)})
    tracemalloc.start()
    try:
        unseal(data, "m")
        assert tracemalloc.get_traced_memory()[1] < 2.5 * len(data), (
            "its text, and what is made of it"
        )
    finally:
        tracemalloc.stop()


def test_a_file_that_opening_calls_too_long_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = manifest()
    monkeypatch.setattr(fields_of_files, "MOST_BYTES", 100)
    with pytest.raises(
        ManifestError, match=r"cannot be saved.* manifest: has \d+ bytes; 100 are allowed"
    ):
        whole.dump()
