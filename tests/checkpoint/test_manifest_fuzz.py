"""Is anything but a valid manifest, part or pointer a ManifestError, whatever the bytes, in bounded memory?

Valid files are changed: in their bytes, with the checksum made right again or not, and in their structure, field by field.
`make soak` does it a million times, or for ten minutes, and says how often.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import altered, inside, places, scrambled, soak
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import manifest, parts, pointer

from tiermem.checkpoint.format.fields import ManifestError, crc32c, encode
from tiermem.checkpoint.format.finding import cover
from tiermem.checkpoint.format.manifest import Manifest, Part, parse_manifest, parse_part, parse_pointer

Parse = Callable[[bytes, str], Any]

EVERY_KIND = encode(
    {
        "floats": [0.5, float("inf"), float("nan"), 1 - 2j],
        "keys": {(1, "a"): {2, 3}, 7: frozenset({b"\0\xff"})},
        "torch": (torch.arange(3, dtype=torch.int16), torch.ones(2, 0), torch.tensor(1.5, dtype=torch.bfloat16)),
        "more": [
            torch.Size([2, 3]),
            torch.float16,
            np.arange(4, dtype="u1").reshape(2, 2),
            np.float32(2.5),
            np.zeros((0, 2)),
        ],
    },
    "values",
)
"""A value of every kind that a file can hold."""

FILES: list[tuple[bytes, Parse]] = [
    (manifest().dump(), parse_manifest),
    (parts()[0].dump(), parse_part),
    (pointer().dump(), parse_pointer),
    (dataclasses.replace(manifest(), client_state=EVERY_KIND).dump(), parse_manifest),
    (dataclasses.replace(parts()[0], rng=EVERY_KIND).dump(), parse_part),
]
_TRAILER = len(b',"crc32c":"00000000"}\n')

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([-1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**40]),
    st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=6),
    st.sampled_from(["weight", "fp32", "8bit", "..", "/etc/passwd", "\0", "$", "tensor", "AAAA", ".scales", "w"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.text(max_size=4), st.sampled_from(["$", "value", "dtype", "shape"])), inner, max_size=4
        ),
    ),
    max_leaves=8,
)


def sealed(body: bytes) -> bytes:
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def read(data: bytes, parse: Parse) -> bool:
    """Whether a file is valid; anything but an answer or a ManifestError is a failure of the test."""
    try:
        found = parse(data, "file")
        if isinstance(found, Manifest):
            cover(found, parts(), "file")
        if isinstance(found, Part):
            cover(manifest(), [found, parts()[1]], "file")
    except ManifestError:
        return False
    if json.loads(data)["version"] > 1:  # what is read of version 1 is not written again
        assert parse(found.dump(), "again") == found
    return True


@settings(max_examples=150, deadline=None)
@given(which=st.integers(0, len(FILES) - 1), chance=st.randoms(use_true_random=False), rights=st.booleans())
def test_changed_bytes_are_refused_or_valid(which: int, chance: random.Random, rights: bool) -> None:
    data, parse = FILES[which]
    body = scrambled(data[:-_TRAILER], chance)
    read(sealed(body) if rights else body + data[-_TRAILER:], parse)


@settings(max_examples=250, deadline=None)
@given(which=st.integers(0, len(FILES) - 1), chance=st.randoms(use_true_random=False), value=VALUES)
def test_changed_fields_are_refused_or_valid(which: int, chance: random.Random, value: Any) -> None:
    data, parse = FILES[which]
    content = json.loads(data)
    del content["crc32c"]
    content = altered(content, chance.choice(places(content)), chance.choice(["replace", "remove", "twice"]), value)
    read(sealed(json.dumps(content, separators=(",", ":")).encode()[:-1]), parse)


@pytest.mark.parametrize(
    "body", [b'{"a":' + b"[" * 200_000, b'{"a":[' + b"[]," * 60_000 + b"[]]", b'{"a":"' + b"x" * 200_000 + b'"']
)
def test_memory_is_bounded_by_the_size_of_the_file(body: bytes) -> None:
    data = sealed(body)
    tracemalloc.start()
    try:
        assert not read(data, parse_manifest)
        assert tracemalloc.get_traced_memory()[1] < 60 * len(data)
    finally:
        tracemalloc.stop()


def test_hostile_sizes_take_no_memory() -> None:
    content = json.loads(FILES[0][0])
    del content["crc32c"]
    content["client_state"] = {"$": "ndarray", "dtype": "f8", "shape": [1 << 40], "value": ""}
    content["parameters"][0]["shape"] = [1 << 30, 1 << 30]
    data = sealed(json.dumps(content).encode()[:-1])
    tracemalloc.start()
    try:
        assert not read(data, parse_manifest)
        assert tracemalloc.get_traced_memory()[1] < 60 * len(data)
    finally:
        tracemalloc.stop()


POOL: list[Any] = [
    None, True, -1, 0, 1, 3, 64, 1.5, 2**31, 2**63 - 1, 2**63, 10**40, "", "x", "w", "weight", "master", "..", "\0", "\ud800",
    "fp32", "split", "8bit", "AAAA", "A", "nan", "1e999", [], {}, [[]], [[], []], [1 << 40], [1 << 50], [1] * 33, [1] * 65,
    ["w", "w"], [["a", 1], ["a", 1, 2]], [[{}, 1]], [{"$": "set", "value": [[1]]}], {"$": "tensor"}, {"$": 1},
    {"$": "tuple", "value": [{"$": "dict", "value": [[[], 1]]}]}, {"$": "bytes", "value": "A"},
    {"$": "scalar", "dtype": "f4", "shape": [1], "value": "AAAAAA=="}, {"$": "bytes", "value": 3},
]  # fmt: skip
DEEP = json.loads("[" * 250 + "]" * 250)


@pytest.mark.soak
def test_a_million_changes_end_in_an_answer_or_a_manifest_error() -> None:
    contents = [json.loads(data) for data, _ in FILES]
    for content in contents:
        del content["crc32c"]

    def try_one(chance: random.Random) -> bool:
        which = chance.randrange(len(FILES))
        data, parse = FILES[which]
        if chance.random() < 0.1:
            return read(scrambled(data, chance)[: chance.choice([None, -1, chance.randrange(len(data))])], parse)
        if chance.random() < 0.4:
            return read(sealed(scrambled(data[:-_TRAILER], chance)), parse)
        content = contents[which]
        for _ in range(chance.choice([1, 1, 2, 3])):
            found = places(content)
            value = chance.choice(POOL) if chance.random() < 0.6 else inside(content, chance.choice(found))
            how = chance.choice(["replace", "replace", "remove", "twice"])
            content = altered(content, chance.choice(found), how, value)
        if chance.random() < 0.02:
            content = altered(content, chance.choice(places(content)), "replace", DEEP)
        return read(sealed(json.dumps(content, separators=(",", ":")).encode()[:-1]), parse)

    totals = soak("manifest fuzz", try_one)
    assert totals["inputs"] > 1000 and totals["valid"]
