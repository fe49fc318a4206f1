"""Mutate: mistakes of streams and ranks, put into the library by a seed, and whether its quick
tests see them.

    mutate.py                     lists the sites of every kind
    mutate.py SEED FIRST STOP     tries some of the 60 mutants of this seed, one after the other, and prints killed or survived

A mutant is one change of one statement, found in the syntax tree of the files below:

    drop a wait             the statement is gone
    skip record_stream      the statement is gone
    swap two events         an event is recorded before the statement that it stood behind
    return a buffer early   a buffer goes back before the statement that it stood behind
    reorder collectives     ranks with odd numbers go through a loop of collectives the other way round

`equivalent.json` says of mutants that survive why no test can see them, by file, kind and
statement.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NUM = 60
_LIMIT_S = 400  # of all tests of a file; beside other work they take a minute
_PARITY = ["tests/accelerator/test_parity.py", "tests/accelerator/test_sent_tiles.py"]
_RANKS = [
    "tests/accelerator/test_ranks.py::test_two_ranks_train_whose_group_takes_tensors_of_devices_alone",
    "tests/accelerator/test_ranks.py::test_groups_within_four_ranks_compute_what_they_compute_on_cpus",
    "tests/ranks/test_gathers.py",
]
_BOTH = [_RANKS[0], *_PARITY]
_PAIR = (
    "tests/accelerator/test_ranks.py::test_two_ranks_on_devices_compute_what_they_compute_on_cpus"
)
TESTS = {
    "tiermem/weights/unit_memory.py": [
        *_BOTH,
        "tests/accelerator/test_failed_transfers.py",
        "tests/zero/test_weights_outside_forward.py",
    ],
    "tiermem/weights/unit_state.py": [
        *_BOTH,
        "tests/accelerator/test_failed_transfers.py",
        "tests/accelerator/test_ranks.py::test_a_mutant_is_seen",
    ],
    "tiermem/wires/gather.py": [*_RANKS, _PAIR],
    "tiermem/wires/packed.py": _RANKS,
    "tiermem/wires/reduce.py": [*_RANKS, "tests/accelerator/test_device_budget.py"],
    "tiermem/ranks/collectives.py": [
        *_RANKS,
        "tests/ranks/test_mesh_on_ranks.py",
        "tests/ranks/test_grads_on_ranks.py",
        "tests/zero/test_init_on_ranks.py",
    ],
    "tiermem/weights/values.py": _BOTH,
    "tiermem/gradients/gradient_link.py": _BOTH,
    "tiermem/gradients/gradient_store.py": _BOTH,
    "tiermem/gradients/gradients.py": [*_BOTH, "tests/ranks/test_grads_on_ranks.py"],
    "tiermem/run/activations.py": _PARITY,
    "tiermem/weights/step_run.py": _PARITY,
    "tiermem/run/move_to_home.py": [*_BOTH, "tests/zero/test_weights.py"],
    "tiermem/optim/tile_stream.py": ["tests/accelerator/test_sent_tiles.py", _PARITY[0]],
    "tiermem/optim/tile_step.py": _PARITY,
    "tiermem/optim/tiles.py": [*_PARITY, "tests/optim/test_precision_states.py"],
    "tiermem/swap/memory/accelerator.py": _PARITY,
    "tiermem/swap/memory/device_memory.py": [
        _PAIR,
        *_PARITY,
        "tests/accelerator/test_offload_states.py",
    ],
    "tiermem/swap/store/move.py": [
        "tests/swap/test_device_copy.py",
        "tests/swap/test_move.py",
        *_PARITY,
    ],
    "tiermem/swap/program/program.py": ["tests/swap/test_program.py", *_PARITY],
}
"""The quick tests that concern a file, in the order in which they are run until one fails."""
_WAITS = {
    "wait_event",
    "wait_stream",
    "synchronize",
    "wait",
    "await_home",
    "await_written",
    "await_unit",
    "begin_filling",
}
_RETURNS = {"give_back", "_give_staging_back", "_give_back", "free", "release", "put"}
_COLLECTIVES = {
    "call",
    "start",
    "swap_rows",
    "all_reduce",
    "broadcast",
    "_begin",
    "gather",
    "gather_unit",
}


class Mutant(NamedTuple):
    file: str
    kind: str
    line: int
    statement: str
    source: str  # of the whole file


@functools.cache
def sites(file: str) -> list[Mutant]:
    """Every mutant of a file."""
    text = (ROOT / file).read_text()
    return [found for block in _blocks(ast.parse(text)) for found in _of_block(file, text, block)]


def drawn(seed: int) -> list[Mutant]:
    """The mutants of a seed: of each kind as many as there are, or its share of 60; the rest from
    all others."""
    choice, by_kind = random.Random(seed), dict[str, list[Mutant]]()
    for found in (each for file in TESTS for each in sites(file)):
        by_kind.setdefault(found.kind, []).append(found)
    chosen: list[Mutant] = []
    left = list[Mutant]()
    for kind in sorted(by_kind):
        choice.shuffle(by_kind[kind])
        chosen += by_kind[kind][: NUM // len(by_kind)]
        left += by_kind[kind][NUM // len(by_kind) :]
    choice.shuffle(left)
    return (chosen + left)[:NUM]


def is_killed(mutant: Mutant) -> tuple[bool, str, float]:
    """Whether a quick test fails with the mutant, which one, and the seconds that it took."""
    module, since = mutant.file.removesuffix(".py").replace("/", "."), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, Path(mutant.file).name)
        file.write_text(mutant.source)
        environment = {
            **os.environ,
            "TIERMEM_MUTANT": f"{module}={file}",
            "PYTHONPATH": str(HERE),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--timeout=120",
        ]
        try:
            done = subprocess.run(
                [*command, *TESTS[mutant.file]],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return True, "the tests hang", time.monotonic() - since
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    said = failed[0] if failed else f"status {done.returncode}"
    return done.returncode != 0, said, time.monotonic() - since


def why_equivalent(mutant: Mutant) -> str:
    """The reason why no test can see a mutant; empty if none is written."""
    for each in json.loads((HERE / "equivalent.json").read_text()):
        if (each["file"], each["kind"], each["statement"]) == (
            mutant.file,
            mutant.kind,
            mutant.statement,
        ):
            return str(each["reason"])
    return ""


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _of_block(file: str, text: str, block: list[ast.stmt]) -> Iterator[Mutant]:
    for before, statement in zip([None, *block], block, strict=False):
        names = _called(statement)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            outer = _name_of(statement.value)
            if outer in _WAITS:
                yield _made(file, text, "drop a wait", statement, "pass")
            if outer == "record_stream":
                yield _made(file, text, "skip record_stream", statement, "pass")
            if (
                outer in _RETURNS
                and _may_follow(before)
                and not _assigned(before) & _used(statement)
            ):
                yield _swapped(file, text, "return a buffer early", before, statement)
        is_recorded = "record" in names and isinstance(statement, ast.Assign | ast.Expr)
        if is_recorded and _may_follow(before) and not _assigned(before) & _used(statement):
            yield _swapped(file, text, "swap two events", before, statement)
        if isinstance(statement, ast.For) and names & _COLLECTIVES:
            given = ast.get_source_segment(text, statement.iter)
            turned = (
                f"(list({given})[::-1] if int(__import__('os').environ.get('RANK', 0)) % 2 "
                f"else {given})"
            )
            yield _made(file, text, "reorder collectives", statement.iter, turned, shown=statement)


def _may_follow(before: ast.stmt | None) -> bool:
    plain = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.With, ast.If, ast.For)
    return isinstance(before, plain) and not (
        isinstance(before, ast.Expr) and isinstance(before.value, ast.Constant)
    )


def _made(
    file: str,
    text: str,
    kind: str,
    node: ast.expr | ast.stmt,
    becomes: str,
    shown: ast.stmt | None = None,
) -> Mutant:
    source = _with(text, node, becomes)
    return Mutant(file, kind, node.lineno, _first_line(text, shown or node), source)


def _swapped(file: str, text: str, kind: str, before: ast.stmt | None, after: ast.stmt) -> Mutant:
    assert before is not None
    first, second = (ast.get_source_segment(text, each) or "" for each in (before, after))
    source = _with(_with(text, after, first), before, second)
    return Mutant(file, kind, after.lineno, _first_line(text, after), source)


def _with(text: str, node: ast.expr | ast.stmt, becomes: str) -> str:
    """The text with other source in the place of a node."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    stop = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = b"".join(lines)
    return (whole[:start] + becomes.encode() + whole[stop:]).decode()


def _first_line(text: str, node: ast.expr | ast.stmt) -> str:
    return (ast.get_source_segment(text, node) or "").splitlines()[0]


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _called(node: ast.AST) -> set[str]:
    return {_name_of(each) for each in ast.walk(node) if isinstance(each, ast.Call)}


def _assigned(node: ast.stmt | None) -> set[str]:
    return {
        each.id
        for each in ast.walk(node or ast.Pass())
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def _used(node: ast.stmt) -> set[str]:
    return {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


def main(words: list[str]) -> int:
    if not words:
        for mutant in (each for file in TESTS for each in sites(file)):
            print(f"{mutant.kind:22} {mutant.file}:{mutant.line} {mutant.statement}")
        return 0
    seed, first, stop = map(int, words)
    num_unseen = 0
    for number, mutant in list(enumerate(drawn(seed)))[first:stop]:
        killed, said, took_s = is_killed(mutant)
        reason = "" if killed else why_equivalent(mutant)
        num_unseen += not (killed or reason)
        state = "killed" if killed else "equivalent" if reason else "SURVIVED"
        print(
            (
                f"{number:2} {state:10} {took_s:5.1f} s  {mutant.kind}: "
                f"{mutant.file}:{mutant.line} "
                f"{mutant.statement} | {said}"
            ),
            flush=True,
        )
    return min(num_unseen, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
