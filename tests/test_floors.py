"""Do imports go down only? Reads the source of every floor, runs none of it.

    tools (3) -> tiermem (2) -> swap (1) -> _tiermem_native (0, through swap/base/native.py alone)

Rules that hold beside that: no circle, packages and files import only what comes before them in the
docstring of their package, the floors are imported as parts of `tiermem`, no instrument
(tests/bench) is imported, the library does not print, swap/memory/accelerator.py alone names a kind
of accelerator, and every module says what it is.

An import counts wherever it is written: in a function, under TYPE_CHECKING, as a string given to
`importlib.import_module`. A name taken from a package's lazy facade (an `__init__` with
`__getattr__`) counts as an import of the module that the facade takes it from. Another name taken
from a package counts as an import of its `__init__`, and of all that this imports.
"""

import ast
import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"swap": 1, "tiermem": 2, "tools": 3}
KINDS = {"cuda", "xpu", "mps", "mtia", "hpu", "npu", "privateuse1", "sim"}
"""Of accelerators, as torch names them."""
ORDERED = (
    "tiermem",
    "tiermem.swap",
    "tiermem.swap.base",
    "tiermem.swap.memory",
    "tiermem.swap.kernels",
    "tiermem.swap.disk",
    "tiermem.swap.store",
    "tiermem.swap.program",
    "tiermem.optimizers",
    "tiermem.config",
    "tiermem.ranks",
    "tiermem.units",
    "tiermem.wires",
    "tiermem.plans",
    "tiermem.weights",
    "tiermem.gradients",
    "tiermem.run",
    "tiermem.layers",
    "tiermem.zero",
    "tiermem.optim",
    "tiermem.checkpoint",
    "tiermem.checkpoint.format",
    "tiermem.checkpoint.saving",
    "tiermem.checkpoint.opening",
    "tiermem.checkpoint.interchange",
    "tiermem.forecast",
    "tiermem.engine",
    "tiermem.integrations",
    "tiermem.tools",
    "tiermem.tools.measure",
    "tiermem.tools.job",
    "tiermem.tools.record",
    "tiermem.tools.plan",
    "tiermem.tools.train",
    "tiermem.tools.bench",
)
"""Packages whose docstring lists their files in order: each imports only what comes before it."""

_NAME_IN_LIST = re.compile(r"(?:^|  )([a-z]\w*)/?(?=  |$)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Module:
    """One file of the house."""

    name: str  # dotted, as imported: tiermem.swap.store.store
    path: Path
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree: several tests go through them."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
        """Import statements, and whether importing the module executes them."""
        return list(walk(self.tree, True))


Modules = dict[str, Module]


class Import(NamedTuple):
    target: str  # dotted, absolute
    line: int
    is_early: bool  # executed when the module is imported


def read_modules(root: Path) -> dict[str, Module]:
    """Parses swap/, tiermem/ (without its two links) and tools/ under `root`."""
    modules = {}
    for folder in FLOORS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[0] == "tiermem" and parts[1] in ("swap", "tools"):
                continue
            parts = parts if parts[0] == "tiermem" else ("tiermem", *parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, path, ast.parse(path.read_text("utf-8"), str(path)))
    return modules


@functools.cache
def read_house() -> dict[str, Module]:
    """The modules of this house, parsed once in each process that runs tests."""
    return read_modules(ROOT)


def floor_of(name: str) -> int:
    """The floor of a dotted name below `tiermem`."""
    parts = name.split(".")
    return FLOORS.get(parts[1], 2) if len(parts) > 1 else 2


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def walk(node: ast.AST, is_early: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yields import statements, and whether importing the module executes them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, is_early
        elif isinstance(child, ast.If) and is_type_checking(child.test):
            for statement in child.body:
                yield from walk(ast.Module([statement], []), False)
            for statement in child.orelse:
                yield from walk(ast.Module([statement], []), is_early)
        else:
            is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, is_early and not is_later)


def base_of(module: Module, node: ast.ImportFrom) -> str:
    """What `from X import ...` names, with leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    package = module.name.split(".")
    if module.path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])


def imports_of(module: Module, modules: dict[str, Module]) -> Iterator[Import]:
    """Yields every import; `from package import module` names the module."""
    for node, is_early in module.imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, is_early)
            continue
        base = base_of(module, node)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield Import(
                full if full in modules or base == "tiermem" else base, node.lineno, is_early
            )


def find_upward_imports(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        for target, line, _ in imports_of(module, modules):
            where = f"{module.path}:{line}: "
            top = target.split(".")[0]
            if top in ("swap", "tools"):
                found.append(f"{where}import {target}: say tiermem.{target}")
            elif top == "bench":
                found.append(f"{where}import {target}: the product imports no instrument")
            elif top == "_tiermem_native" and module.name != "tiermem.swap.base.native":
                found.append(f"{where}only swap/base/native.py imports _tiermem_native")
            elif top == "tiermem" and floor_of(target) > floor_of(module.name):
                found.append(f"{where}{module.name} imports {target}, a higher floor")
    return found


def find_circle(modules: Mapping[str, Module]) -> list[str]:
    """Returns the modules of the largest circle of imports, or nothing."""
    return largest_circle(graph_of(modules))


def order_of(package: str, modules: Mapping[str, Module]) -> list[str]:
    """The names of a package's files, in the order of its docstring: two spaces, or the end of a
    line, stand around a name."""
    listed = _NAME_IN_LIST.findall(ast.get_docstring(modules[package].tree) or "")
    return [name for name in listed if f"{package}.{name}" in modules]


def find_disorder(modules: Mapping[str, Module]) -> list[str]:
    """Returns imports of what comes later in the docstring of the package where the two part. A
    facade may offer anything."""
    orders = {package: order_of(package, modules) for package in ORDERED if package in modules}
    found = []
    for name, targets in graph_of(modules).items():
        for target in sorted(targets) if not is_facade(modules[name]) else ():
            package, mine, its = where_they_part(name, target)
            order = orders.get(package, [])
            if mine in order and its in order and order.index(its) > order.index(mine):
                found.append(f"{name} imports {target}: in {package} {its} comes after {mine}")
    return found


def find_unlisted(modules: Mapping[str, Module]) -> list[str]:
    """Returns files that the docstring of their package does not list once."""
    return [
        f"{package} lists {name} {count} times"
        for package in ORDERED
        if package in modules
        for name in modules
        if name.rpartition(".")[0] == package
        and (count := order_of(package, modules).count(name.rpartition(".")[2])) != 1
    ]


def where_they_part(one: str, other: str) -> tuple[str, str, str]:
    """Two dotted names: the longest package that both are in, and what comes next in each."""
    a, b = one.split("."), other.split(".")
    same = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return ".".join(a[:same]), *("".join(each[same : same + 1]) for each in (a, b))


def homes_of(module: Module) -> dict[str, str]:
    """What a lazy facade offers, and the module each name is taken from."""
    homes: dict[str, str] = {}
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and is_facade(module):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            homes |= {
                key.value: value.value
                for key, value in pairs
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
            }
    return homes


def is_facade(module: Module) -> bool:
    """Whether the module is a package that imports its names when they are asked for."""
    names = {node.name for node in module.tree.body if isinstance(node, ast.FunctionDef)}
    return module.path.name == "__init__.py" and "__getattr__" in names


def targets_of(
    module: Module, modules: Mapping[str, Module], homes: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Yields the dotted name of everything that a module imports, anywhere in its source."""
    for node, _ in module.imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            continue
        base = base_of(module, node)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield homes.get(base, {}).get(alias.name) or (full if full in modules else base)
    yield from homes[module.name].values()
    for call in module.nodes:
        if (
            isinstance(call, ast.Call)
            and call.args
            and isinstance(name := call.args[0], ast.Constant)
        ):
            called = (
                call.func.attr
                if isinstance(call.func, ast.Attribute)
                else getattr(call.func, "id", "")
            )
            if called == "import_module":
                yield str(name.value)


def graph_of(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Which modules each module imports."""
    homes = {name: homes_of(module) for name, module in modules.items()}
    return {
        name: {
            target
            for target in targets_of(module, modules, homes)
            if target in modules and target != name
        }
        for name, module in modules.items()
    }


def largest_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The largest set of modules that all import each other, directly or through others; empty when
    there is none."""
    reached = {name: reach(graph, name) for name in graph}
    circles = [[other for other in reached[name] if name in reached[other]] for name in graph]
    return sorted(max(circles, key=len, default=[]))


def reach(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Every module that `start` imports, directly or through others; `start` itself where it is in
    a circle."""
    found: set[str] = set()
    open_ends = [start]
    while open_ends:
        new = graph[open_ends.pop()] - found
        found |= new
        open_ends.extend(new)
    return found


def find_prints(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.path}:{node.lineno}: print"
        for module in modules.values()
        if floor_of(module.name) < FLOORS["tools"]
        for node in module.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def find_kinds(modules: dict[str, Module]) -> list[str]:
    """Returns where a kind of accelerator is named: `torch.cuda`, an import of it, a call or
    comparison with "cuda".

    swap/memory/accelerator.py may; config/io.py may compare; tools/bench/peer_operators.py is a
    program without tiermem.
    """
    found = []
    for module in modules.values():
        if module.name in ("tiermem.swap.memory.accelerator", "tiermem.tools.bench.peer_operators"):
            continue
        for node in module.nodes:
            if not isinstance(
                node, ast.Attribute | ast.Import | ast.ImportFrom | ast.Call | ast.Compare
            ):
                continue
            if isinstance(node, ast.Compare) and module.name == "tiermem.config.io":
                continue
            if kinds := sorted(KINDS & set(kinds_in(node))):
                found.append(
                    f"{module.path}:{node.lineno}: {', '.join(kinds)}: ask "
                    "swap/memory/accelerator.py"
                )
    return found


def kinds_in(node: ast.AST) -> Iterator[str]:
    """Yields what a node says that may be a kind of accelerator."""
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ):
        yield node.attr
    elif isinstance(node, ast.Import):
        yield from (
            alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torch.")
        )
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        yield from [*(node.module or "").split(".")[1:2], *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda", "xpu", "is_xpu"):
        yield node.attr.removeprefix("is_")
    texts: list[ast.expr] = []
    if isinstance(node, ast.Call):
        texts = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Compare):
        texts = [node.left, *node.comparators]
    for text in texts:
        for each in text.elts if isinstance(text, ast.Tuple | ast.List | ast.Set) else [text]:
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value.split(":")[0]


def find_undescribed(modules: dict[str, Module]) -> list[str]:
    return [str(module.path) for module in modules.values() if not ast.get_docstring(module.tree)]


@pytest.fixture(scope="module")
def house() -> Modules:
    return read_house()


def test_imports_go_down_only(house: Modules) -> None:
    assert find_upward_imports(house) == []


def test_no_circle_of_imports(house: Modules) -> None:
    assert find_circle(house) == []


def test_rooms_and_files_import_only_what_comes_before_them(house: Modules) -> None:
    assert find_disorder(house) == []


def test_docstrings_list_each_file_of_their_package_once(house: Modules) -> None:
    assert find_unlisted(house) == []


def test_a_class_name_is_unique(house: Modules) -> None:
    found = collections.Counter(
        node.name
        for module in house.values()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    )
    assert len(found) > 500
    assert [name for name, count in found.items() if count > 1] == []


def test_library_does_not_print(house: Modules) -> None:
    assert find_prints(house) == []


def test_one_module_names_kinds_of_accelerators(house: Modules) -> None:
    assert find_kinds(house) == []


def test_every_module_says_what_it_is(house: Modules) -> None:
    assert find_undescribed(house) == []


def test_every_floor_is_read(house: Modules) -> None:
    floors = {floor_of(name) for name in house}
    assert floors == {1, 2, 3}


BAD = {
    "swap importing floor 2": (
        "swap/store.py",
        "from tiermem.config import policy",
        find_upward_imports,
    ),
    "swap importing floor 2 by dots": (
        "swap/store.py",
        "from ..config import policy",
        find_upward_imports,
    ),
    "swap importing tools": ("swap/store.py", "import tiermem.tools.cli", find_upward_imports),
    "swap importing the root": (
        "swap/store.py",
        "from tiermem import initialize",
        find_upward_imports,
    ),
    "floor 2 importing tools": (
        "tiermem/engine.py",
        "from tiermem.tools import cli",
        find_upward_imports,
    ),
    "floor 2 importing tools late": (
        "tiermem/engine.py",
        "def f():\n    from .tools import cli",
        find_upward_imports,
    ),
    "floor 2 importing the binding": (
        "tiermem/engine.py",
        "import _tiermem_native",
        find_upward_imports,
    ),
    "the product importing an instrument": (
        "tools/cli.py",
        "from bench import overlap",
        find_upward_imports,
    ),
    "swap as a top-level package": ("tools/cli.py", "import swap.store", find_upward_imports),
    "tools as a top-level package": ("tools/cli.py", "from tools import plan", find_upward_imports),
    "a cycle": ("swap/arena.py", "def f():\n    from tiermem.swap import store", find_circle),
    "a cycle by dots": ("swap/arena.py", "from .store import TensorStore", find_circle),
    "a file importing one that comes after it": (
        "swap/tier.py",
        "from tiermem.swap import arena",
        find_disorder,
    ),
    "a room importing one that comes after it": (
        "tiermem/policy.py",
        "from tiermem.zero import unit",
        find_disorder,
    ),
    "a file that no docstring lists": (
        "swap/new.py",
        "from tiermem.swap import tier",
        find_unlisted,
    ),
    "a print": ("tiermem/engine.py", "print('hello')", find_prints),
    "torch.cuda": ("tools/cli.py", "import torch\ntorch.cuda.synchronize()", find_kinds),
    "torch.xpu in a function": (
        "swap/store.py",
        "def f():\n    return torch.xpu.is_available()",
        find_kinds,
    ),
    "an import of torch.cuda": ("tiermem/engine.py", "import torch.cuda", find_kinds),
    "a part of torch.cuda": ("tiermem/engine.py", "from torch.cuda import Stream", find_kinds),
    "cuda out of torch": ("tiermem/engine.py", "from torch import cuda", find_kinds),
    "a device by name": ("tiermem/engine.py", "device = torch.device('cuda:0')", find_kinds),
    "a tensor's own method": ("swap/store.py", "def f(x):\n    return x.cuda()", find_kinds),
    "a comparison": (
        "tiermem/engine.py",
        "def f(x):\n    return x.device.type in ('cuda', 'xpu')",
        find_kinds,
    ),
    "no docstring": ("tiermem/bare.py", None, find_undescribed),
}


def write_tree(root: Path) -> None:
    """A good source tree in small."""
    files = {
        "swap/__init__.py": listed("base", "memory", "tier", "arena", "store"),
        "swap/base/__init__.py": listed("native"),
        "swap/base/native.py": "import _tiermem_native",
        "swap/memory/__init__.py": listed("accelerator"),
        "swap/memory/accelerator.py": "import torch\ntorch.cuda.synchronize()",
        "swap/tier.py": "",
        "swap/arena.py": "from tiermem.swap.tier import Tier",
        "swap/store.py": "from tiermem.swap import arena\nfrom tiermem.swap.base import native",
        "tiermem/__init__.py": listed("swap", "policy", "config", "zero", "engine", "tools")
        + "def __getattr__(name):\n    from tiermem.engine import Engine",
        "tiermem/policy.py": "",
        "tiermem/zero/__init__.py": listed("unit"),
        "tiermem/units/unit.py": "from tiermem import policy",
        "tiermem/engine.py": "from tiermem.zero import unit\nfrom tiermem import policy",
        "tiermem/config/__init__.py": listed("io"),
        "tiermem/config/io.py": "def f(device):\n    return device.type == 'cuda'",
        "tools/__init__.py": listed("bench", "cli"),
        "tools/bench/__init__.py": listed("peer_operators"),
        "tools/bench/peer_operators.py": "import torch\ntorch.cuda.synchronize()",
        "tools/cli.py": "from tiermem.swap import store\nprint('fine')",
    }
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        said = "" if source.startswith('"""') else '"""What it is."""\n'
        path.write_text(f"{said}{source}\n", "utf-8")


def listed(*names: str) -> str:
    """The docstring of a package that lists names in order."""
    return "\n".join(['"""What it is.', "", *(f"    {name}  a file" for name in names), '"""', ""])


def test_a_good_tree_passes(tmp_path: Path) -> None:
    write_tree(tmp_path)
    modules = read_modules(tmp_path)
    for find in (
        find_upward_imports,
        find_prints,
        find_kinds,
        find_undescribed,
        find_circle,
        find_disorder,
        find_unlisted,
    ):
        assert find(modules) == []


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_tree_is_found(tmp_path: Path, fault: str) -> None:
    write_tree(tmp_path)
    name, source, find = BAD[fault]
    (tmp_path / name).write_text(
        "x = 1\n" if source is None else f'"""What it is."""\n{source}\n', "utf-8"
    )
    assert find(read_modules(tmp_path)) != []


CIRCLES = {
    "at the top": ("from tiermem.b import x", "import tiermem.a"),
    "in a function": ("from tiermem.b import x", "def f():\n    from tiermem import a"),
    "by dots": ("from . import b", "def f():\n    from .a import x"),
    "under TYPE_CHECKING": (
        "from tiermem.b import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tiermem.a",
    ),
    "through a facade": ("from tiermem.b import x", "from tiermem.room import Name"),
    "as a string": (
        "from tiermem.b import x",
        "import importlib\nimportlib.import_module('tiermem.a')",
    ),
}
FACADE = "_HOMES = {'Name': 'tiermem.a'}\ndef __getattr__(name):\n    from tiermem import a, b"


@pytest.mark.parametrize("kind", CIRCLES)
def test_a_circle_is_found(tmp_path: Path, kind: str) -> None:
    assert find_circle(written(tmp_path, *CIRCLES[kind])) == ["tiermem.a", "tiermem.b"]


def test_no_circle_is_found_where_there_is_none(tmp_path: Path) -> None:
    modules = written(tmp_path, "from tiermem.b import x", "import torch")
    assert find_circle(modules) == []


def test_a_facade_imports_all_that_it_offers(tmp_path: Path) -> None:
    modules = written(tmp_path, "from tiermem.room import Other", "import torch")
    assert find_circle(modules) == ["tiermem.a", "tiermem.room"]


def written(root: Path, a: str, b: str) -> dict[str, Module]:
    """A package of two modules and a lazy facade."""
    (root / "tiermem" / "room").mkdir(parents=True)
    for name, source in {"__init__": "", "a": a, "b": b, "room/__init__": FACADE}.items():
        (root / "tiermem" / f"{name}.py").write_text(source + "\n", "utf-8")
    return read_modules(root)
