"""Does the house get no heavier? Counts files and lines of code; runs nothing. (test_floors.py counts circles: none.)

files     Python files of swap, tiermem and tools
lines     their lines without blanks, comments and docstrings (those of attributes too)
file      the lines of the longest file
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest
from test_floors import ROOT, Module, read_modules

REDESIGNED = {"files": 162, "lines": 28138, "file": 396}
"""At the end of the redesign, at commit 39faacb. It began with 338 files and 32,917 lines."""

ADDED = {
    "Hugging Face, Accelerate, DeepSpeed's names": (9, 1012),
    "copies that hide, the budget of a device, activations that move": (6, 1126),
    "compute precision, vector kernels, memory nodes, answers to wrong commands": (4, 862),
    "many small states in fewer passes, the peak of zero.Init": (0, 144),
    "views of weights that have gone": (0, 23),
    "a step on the device, whole or in part; what the host's plan counts": (2, 197),
    "PEFT's adapters, frozen weights in int8 and nf4 blocks": (1, 197),
    "optimizers for ordinary parameters and DTensors, averages, exports, Lightning": (4, 1092),
    "the native step program, a step under the next forward": (3, 829),
    "a step under backward, gradients of a device that come to tiles": (3, 379),
    "steps beside maths for weights that rest in memory": (0, 72),
    "bench overlap, overlap in forecasts and pictures, sustained rates": (5, 909),
    "activations and units chosen by cost, a KV cache's room, an accelerator that is emptied": (2, 496),
    "parameters that are unfrozen after sharding": (2, 372),
    "micro-batches that pass each block in turn": (2, 708),
    "bench gpu: passes, traces, a large model, peers": (6, 656),
    "TensorBoard, what limits a step, the parity report": (1, 313),
    "states that rest elsewhere and are stepped on an accelerator": (1, 152),
    "a Triton kernel of the device's step": (1, 441),
    "what a card holds, in plan and train; the device's step in the forecast": (1, 201),
    "steps under backward of states in memory beside an accelerator": (0, 135),
    "a durable step that is committed at the next backward, layers in a Trainer": (0, 105),
    "one exchange in a step, native steps that are kept": (0, 97),
    "one slab for each kind on a device, one wait": (0, 18),
    "gradients that memory still has": (1, 92),
    "runs that are never committed end with their program": (0, 24),
    "recomputation, and tiles sent to an accelerator, chosen by plan and train": (0, 155),
    "steps that are planned while ranks exchange norms": (0, 35),
    "what passes between ranks in slabs of a device": (0, 55),
    "a rank that dies amid a message": (0, 22),
    "weights at rest on a device that come to tiles; what is refused in a capture; the norm's room": (0, 67),
    "scalars and places that a step on ranks asks for once": (0, 35),
    "a plan's step is played when asked, by a simulator that counts": (0, 29),
    "two gradients that leave a device, in its plan": (0, 2),
    "rows of numbers that do not pass each other between ranks": (0, 35),
    "steps in backward on a device that no thread of autograd waits for; a bound for packing": (0, 8),
    "a skipped step drops what backward stepped": (0, 2),
    "ranges of tiles that are planned once; the CPU time of Python in steps": (1, 184),
    "engines that clip begin steps under backward, in a slot taken then; what is missing": (0, 92),
    "parts of a unit that are copied while the rest is stepped; the peak of a card": (0, 39),
    "plans of tiles that are kept, and told in columns; an interrupt while a folder is made": (0, 47),
    "tiles that native steps pass in strips": (0, 57),
    "native steps beside tiles that are sent; a host's memory that kernels and copies share": (0, 79),
    "threads that read one file": (0, 10),
    "memory that all cores make resident": (0, 4),
    "a Triton kernel of the norm's squares, one room for a device's kernels, tiles as large as units": (2, 103),
}
"""What each ability has added since: files, lines. A new ability has a line of its own; nothing else may raise the numbers."""

MOST = {
    "files": REDESIGNED["files"] + sum(files for files, _ in ADDED.values()),
    "lines": REDESIGNED["lines"] + sum(lines for _, lines in ADDED.values()),
    "file": REDESIGNED["file"],
}
"""Whoever makes the code lighter lowers a number above in the same commit."""


def code_lines(tree: ast.Module, source: str) -> int:
    """Lines that are neither blank, nor a comment, nor part of a string that stands by itself."""
    described: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            described |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(1 for number, line in lines if line.strip() and line.strip()[0] != "#" and number not in described)


def weigh(modules: Mapping[str, Module]) -> dict[str, int]:
    """The numbers that may only fall."""
    lines = [code_lines(module.tree, module.path.read_text("utf-8")) for module in modules.values()]
    return {"files": len(modules), "lines": sum(lines), "file": max(lines)}


@pytest.fixture(scope="module")
def weights() -> dict[str, int]:
    return weigh(read_modules(ROOT))


@pytest.mark.parametrize("what", MOST)
def test_the_house_gets_no_heavier(weights: dict[str, int], what: str) -> None:
    assert weights[what] <= MOST[what], (
        f"{what}: {weights[what]}, and at most {MOST[what]} are allowed: make it lighter"
    )


@pytest.mark.parametrize("what", MOST)
def test_the_numbers_are_lowered_when_the_house_is_lighter(weights: dict[str, int], what: str) -> None:
    assert weights[what] >= MOST[what], f"{what}: now {weights[what]}; lower MOST[{what!r}] to that in this commit"


# ---- the counting itself ---------------------------------------------------------------------------------------------


def test_only_code_is_counted() -> None:
    source = '"""Text\n\nof two lines."""\n\n# why\nx = 1  # so\n"""What x is."""\n\n\ndef f():\n    """F."""\n'
    assert code_lines(ast.parse(source), source) == 2
