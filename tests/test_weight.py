"""Does the house get no heavier? Counts tokens of Python code by room; runs nothing. `make lint`
prints them, and fails where there are too many.

A token is what Python's own tokenizer calls one, without comments, docstrings, line ends and
indents. Lines are not counted: a limit on lines makes dense lines.
"""

from __future__ import annotations

import ast
import collections
import io
import tokenize
from collections.abc import Iterator, Mapping

import pytest
from test_floors import Module, read_house

CEILING = 432_807
"""Tokens of swap, tiermem and tools. A change that needs more removes as much, or raises this in a
commit that says why."""

_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def described_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines of docstrings, those of attributes too."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count_tokens(tree: ast.Module, source: str) -> int:
    """The tokens of a file's code."""
    described = described_lines(tree)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        1 for token in tokens if token.type not in _SILENT and token.start[0] not in described
    )


def weigh(modules: Mapping[str, Module]) -> dict[str, int]:
    """Tokens by room: a package, or the files that lie in tiermem itself."""
    weights: collections.Counter[str] = collections.Counter()
    for name, module in modules.items():
        parts = name.split(".")
        is_package = module.path.name == "__init__.py"
        room = ".".join(parts if is_package else parts[:-1])
        weights[room] += count_tokens(module.tree, module.path.read_text("utf-8"))
    return dict(weights)


def longest(
    modules: Mapping[str, Module], kind: type[ast.AST] | tuple[type[ast.AST], ...]
) -> Iterator[tuple[int, str]]:
    """The ten longest definitions of a kind: their lines, where they stand."""
    found = [
        (node.end_lineno - node.lineno + 1, f"{name}.{node.name}")  # type: ignore[attr-defined]
        for name, module in modules.items()
        for node in ast.walk(module.tree)
        if isinstance(node, kind)
    ]
    yield from sorted(found, reverse=True)[:10]


@pytest.mark.slow  # `make lint` says the same
def test_the_house_gets_no_heavier() -> None:
    weight = sum(weigh(read_house()).values())
    assert weight <= CEILING, f"{weight} tokens, and at most {CEILING} are allowed: make it lighter"


def test_only_code_is_counted() -> None:
    source = (
        '"""Text\n\nof two lines."""\n\n# why\nx = 1  # so\n"""What x is."""\n\n\ndef f():\n  '
        '  """F."""\n'
    )
    assert count_tokens(ast.parse(source), source) == len(
        ["x", "=", "1", "def", "f", "(", ")", ":"]
    )


def main() -> None:
    """Prints the weight of each room, and the ten longest classes and functions."""
    modules = read_house()
    weights = weigh(modules)
    print(f"{sum(weights.values()):,} tokens of {CEILING:,}")
    for room, tokens in sorted(weights.items(), key=lambda each: -each[1]):
        print(f"  {tokens:>7,}  {room}")
    for what, kind in (
        ("classes", ast.ClassDef),
        ("functions", (ast.FunctionDef, ast.AsyncFunctionDef)),
    ):
        print(f"longest {what}, in lines:")
        for lines, where in longest(modules, kind):
            print(f"  {lines:>7}  {where}")
    if sum(weights.values()) > CEILING:
        raise SystemExit("the house has got heavier: make it lighter")


if __name__ == "__main__":
    main()
