"""Does every exception of the library survive pickling and copying? Worker pools hang or break on
one that does not."""

from __future__ import annotations

import ast
import builtins
import copy
import errno
import functools
import importlib
import pickle
import re
from pathlib import Path
from typing import Any

from test_floors import read_house

from tiermem.checkpoint.opening.verified import DamagedState
from tiermem.policy import CombinedError
from tiermem.section import ConfigError, Problem
from tiermem.swap.base.errors import CorruptionError, DamagedEntry, Place
from tiermem.swap.base.native import READ, TransferError
from tiermem.swap.base.ranges import FileRange

MADE: dict[type[Exception], list[Any]] = {
    CombinedError: [[("a", "is wrong"), ("b", "too")]],
    ConfigError: [[Problem("zero.stage", "7 given"), Problem("", "all of it")], "ds.json"],
    CorruptionError: ["it is wrong", "/f", 4096, 512, 1, 2],
    DamagedEntry: [
        Place("w", 0, 512, (FileRange(Path("/f"), 4096, 512),)),
        "master of w",
        1,
        2,
        "Go back",
    ],
    DamagedState: [
        [FileRange(Path("/f"), 0, 9), FileRange(Path("/g"), 0, 9)],
        "w",
        "master",
        0,
        9,
        7,
        1,
        2,
        "Go back",
    ],
    TransferError: [errno.EIO, READ, "/f", 4096, 512],
}
"""What those are made of that are not made of a text."""


@functools.cache
def exceptions() -> list[type[Exception]]:
    """Every exception that a module of the library defines; only those modules are imported."""
    classes = [
        (module, each.name, {ast.unparse(base).rpartition(".")[2] for base in each.bases})
        for module in read_house().values()
        for each in ast.walk(module.tree)
        if isinstance(each, ast.ClassDef)
    ]
    names = {
        name
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    found: dict[str, str] = {}
    while more := {
        name: module.name for module, name, bases in classes if bases & names and name not in found
    }:
        found |= more
        names |= set(more)
    return [
        getattr(importlib.import_module(module), name) for name, module in sorted(found.items())
    ]


def made(kind: type[Exception]) -> Exception:
    default: list[Any] = (
        [errno.EIO, "it failed", "/f"] if issubclass(kind, OSError) else ["it failed"]
    )
    error = kind(*MADE.get(kind, default))
    error.note = "added later"  # type: ignore[attr-defined]
    return error


def test_every_exception_comes_back_as_it_was() -> None:
    kinds = exceptions()
    assert set(MADE) <= set(kinds)
    assert len(kinds) > 15
    for kind in kinds:
        error = made(kind)
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is kind
            assert str(again) == str(error)
            assert again.args == error.args
            assert vars(again) == vars(error)
            for name in ("errno", "strerror", "filename"):
                assert getattr(again, name, None) == getattr(error, name, None)


def test_the_page_of_errors_lists_every_exception() -> None:
    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == {kind.__name__ for kind in exceptions() if ".tools." not in kind.__module__}
