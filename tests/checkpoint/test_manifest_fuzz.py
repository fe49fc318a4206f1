"""Is anything but a valid manifest, part or pointer a ManifestError, whatever the bytes, in bounded memory?

Valid files are changed: in their bytes, with the checksum made right again or not, and in their structure, field by field.
`make soak` does it a million times, or for ten minutes, and says how often.
"""

from __future__ import annotations

import copy
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import manifest, parts, pointer

from tiermem.checkpoint.format.cover import cover
from tiermem.checkpoint.format.crc import crc32c
from tiermem.checkpoint.format.manifest import Manifest, ManifestError, Part, parse_manifest, parse_part, parse_pointer

Parse = Callable[[bytes, str], Any]

FILES: list[tuple[bytes, Parse]] = [
    (manifest().dump(), parse_manifest),
    (parts()[0].dump(), parse_part),
    (pointer().dump(), parse_pointer),
]
_TRAILER = len(b',"crc32c":"00000000"}\n')
_MOST_SOAK, _SOAK_S = 1_000_000, 600.0

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
    assert parse(found.dump(), "again") == found
    return True


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every value in some JSON."""
    found = [path]
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def altered(content: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    """JSON with one value replaced, removed or there twice."""
    if not path:
        return value
    content = copy.deepcopy(content)
    inside = content
    for key in path[:-1]:
        inside = inside[key]
    if how == "remove":
        del inside[path[-1]]
    elif how == "twice" and isinstance(inside, list):
        inside.insert(path[-1], copy.deepcopy(inside[path[-1]]))
    else:
        inside[path[-1]] = value
    return content


def scrambled(data: bytes, chance: random.Random) -> bytes:
    """Bytes with a few changed, cut out, or put in."""
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(data) + 1), chance.choice([1, 1, 2, 8, 100])
        new = chance.choice(
            [b"", chance.randbytes(length), chance.choice([b"[", b"{", b'"', b"-", b"9" * 30, b"1e999", b"null"])]
        )
        data = data[:at] + new + data[at + chance.choice([0, 1, length]) :]
    return data


@settings(max_examples=150, deadline=None)
@given(which=st.integers(0, 2), chance=st.randoms(use_true_random=False), rights=st.booleans())
def test_changed_bytes_are_refused_or_valid(which: int, chance: random.Random, rights: bool) -> None:
    data, parse = FILES[which]
    body = scrambled(data[:-_TRAILER], chance)
    read(sealed(body) if rights else body + data[-_TRAILER:], parse)


@settings(max_examples=250, deadline=None)
@given(which=st.integers(0, 2), chance=st.randoms(use_true_random=False), value=VALUES)
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


@pytest.mark.soak
def test_a_million_changes_end_in_an_answer_or_a_manifest_error() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance, end, num_valid, number = random.Random(seed), time.monotonic() + _SOAK_S, 0, 0
    contents = [json.loads(data) for data, _ in FILES]
    for content in contents:
        del content["crc32c"]
    all_places = [places(content) for content in contents]
    pool = [
        None,
        True,
        -1,
        0,
        1,
        1.5,
        2**63,
        10**40,
        "",
        "x",
        "w",
        "..",
        "\0",
        "fp32",
        [],
        {},
        [[]],
        {"$": "tensor"},
        ["w", "w"],
    ]
    try:
        while number < _MOST_SOAK and time.monotonic() < end:
            which = chance.randrange(3)
            data, parse = FILES[which]
            if chance.random() < 0.5:
                body = scrambled(data[:-_TRAILER], chance)
            else:
                how = chance.choice(["replace", "remove", "twice"])
                content = altered(contents[which], chance.choice(all_places[which]), how, chance.choice(pool))
                body = json.dumps(content, separators=(",", ":")).encode()[:-1]
            number += 1
            num_valid += read(sealed(body), parse)
    finally:
        print(f"manifest fuzz: seed {seed}, {number} files, {num_valid} of them valid")
    assert number > 1000
