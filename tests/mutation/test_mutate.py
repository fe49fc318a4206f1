"""Does the script find sites of every kind, and are its mutants programs, and its reasons those of
mutants?"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import mutate

KINDS = {
    "drop a wait",
    "reorder collectives",
    "return a buffer early",
    "skip record_stream",
    "swap two events",
}
SEED = 1


@pytest.mark.slow
def test_a_seed_draws_sixty_mutants_of_every_kind_that_are_programs() -> None:
    mutants = mutate.drawn(SEED)
    assert (
        len(mutants) == len({(each.file, each.kind, each.line) for each in mutants}) == mutate.NUM
    )
    assert {each.kind for each in mutants} == KINDS
    assert mutants == mutate.drawn(SEED) != mutate.drawn(SEED + 1)
    for each in mutants:
        ast.parse(each.source)
        assert each.source != (mutate.ROOT / each.file).read_text()


def test_the_tests_of_every_file_are_there() -> None:
    for file, tests in mutate.TESTS.items():
        assert mutate.sites(file), file
        assert all((mutate.ROOT / name.partition("::")[0]).is_file() for name in tests)


def test_every_reason_is_of_a_mutant_that_there_is() -> None:
    there = {
        (each.file, each.kind, each.statement)
        for file in mutate.TESTS
        for each in mutate.sites(file)
    }
    for each in json.loads((mutate.HERE / "equivalent.json").read_text()):
        assert (each["file"], each["kind"], each["statement"]) in there and each["reason"]
