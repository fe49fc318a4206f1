"""Do imports go down only? Reads the source of every floor, runs none of it.

    tools (3) -> tiermem (2) -> swap (1) -> _tiermem_native (0, through swap/native.py alone)

Rules that hold beside that: no cycle of top-level imports, the floors are imported as parts of `tiermem`, the
library does not print, swap/accelerator.py alone names a kind of accelerator, and every module says what it is.
Imports under TYPE_CHECKING count for the floors but not for cycles: at run time they are not there.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"swap": 1, "tiermem": 2, "tools": 3}
KINDS = {"cuda", "xpu", "mps", "mtia", "hpu", "npu", "privateuse1", "sim"}
"""Of accelerators, as torch names them."""


class Module(NamedTuple):
    name: str  # dotted, as imported: tiermem.swap.store
    path: Path
    tree: ast.Module


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
    for node, is_early in walk(module.tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, is_early)
            continue
        base = base_of(module, node)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield Import(full if full in modules or base == "tiermem" else base, node.lineno, is_early)


def find_upward_imports(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        for target, line, _ in imports_of(module, modules):
            where = f"{module.path}:{line}: "
            top = target.split(".")[0]
            if top in ("swap", "tools"):
                found.append(f"{where}import {target}: say tiermem.{target}")
            elif top == "_tiermem_native" and module.name != "tiermem.swap.native":
                found.append(f"{where}only swap/native.py imports _tiermem_native")
            elif top == "tiermem" and floor_of(target) > floor_of(module.name):
                found.append(f"{where}{module.name} imports {target}, a higher floor")
    return found


def find_cycle(modules: dict[str, Module]) -> list[str]:
    """Returns the modules of one cycle of early imports, or nothing."""
    edges = {
        name: [i.target for i in imports_of(module, modules) if i.is_early and i.target in modules]
        for name, module in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in edges[name]:
            # A package's own __init__ may import its parts, which say `from . import` to each other.
            if target != name and (cycle := visit(target, [*path, name])):
                return cycle
        done.add(name)
        return []

    for name in edges:
        if cycle := visit(name, []):
            return cycle
    return []


def find_prints(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.path}:{node.lineno}: print"
        for module in modules.values()
        if floor_of(module.name) < FLOORS["tools"]
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def find_kinds(modules: dict[str, Module]) -> list[str]:
    """Returns where a kind of accelerator is named: `torch.cuda`, an import of it, a call or comparison with "cuda".

    swap/accelerator.py may; config/gds.py may compare; tools/peer*.py are programs without tiermem.
    """
    found = []
    for module in modules.values():
        if module.name == "tiermem.swap.accelerator" or module.name.startswith("tiermem.tools.peer"):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Compare) and module.name == "tiermem.config.gds":
                continue
            if kinds := sorted(KINDS & set(kinds_in(node))):
                found.append(f"{module.path}:{node.lineno}: {', '.join(kinds)}: ask swap/accelerator.py")  # type: ignore[attr-defined]
    return found


def kinds_in(node: ast.AST) -> Iterator[str]:
    """Yields what a node says that may be a kind of accelerator."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        yield node.attr
    elif isinstance(node, ast.Import):
        yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torch."))
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


def test_imports_go_down_only() -> None:
    assert find_upward_imports(read_modules(ROOT)) == []


def test_no_import_cycle() -> None:
    assert find_cycle(read_modules(ROOT)) == []


def test_library_does_not_print() -> None:
    assert find_prints(read_modules(ROOT)) == []


def test_one_module_names_kinds_of_accelerators() -> None:
    assert find_kinds(read_modules(ROOT)) == []


def test_every_module_says_what_it_is() -> None:
    assert find_undescribed(read_modules(ROOT)) == []


def test_every_floor_is_read() -> None:
    floors = {floor_of(name) for name in read_modules(ROOT)}
    assert floors == {1, 2, 3}


BAD = {
    "swap importing floor 2": ("swap/store.py", "from tiermem.config import policy", find_upward_imports),
    "swap importing floor 2 by dots": ("swap/store.py", "from ..config import policy", find_upward_imports),
    "swap importing tools": ("swap/store.py", "import tiermem.tools.cli", find_upward_imports),
    "swap importing the root": ("swap/store.py", "from tiermem import initialize", find_upward_imports),
    "floor 2 importing tools": ("tiermem/engine.py", "from tiermem.tools import cli", find_upward_imports),
    "floor 2 importing tools late": ("tiermem/engine.py", "def f():\n    from .tools import cli", find_upward_imports),
    "floor 2 importing the binding": ("tiermem/engine.py", "import _tiermem_native", find_upward_imports),
    "swap as a top-level package": ("tools/cli.py", "import swap.store", find_upward_imports),
    "tools as a top-level package": ("tools/cli.py", "from tools import plan", find_upward_imports),
    "a cycle": ("swap/store.py", "from tiermem.swap import tier", find_cycle),
    "a cycle by dots": ("swap/store.py", "from .tier import Tier", find_cycle),
    "a print": ("tiermem/engine.py", "print('hello')", find_prints),
    "torch.cuda": ("tools/cli.py", "import torch\ntorch.cuda.synchronize()", find_kinds),
    "torch.xpu in a function": ("swap/store.py", "def f():\n    return torch.xpu.is_available()", find_kinds),
    "an import of torch.cuda": ("tiermem/engine.py", "import torch.cuda", find_kinds),
    "a part of torch.cuda": ("tiermem/engine.py", "from torch.cuda import Stream", find_kinds),
    "cuda out of torch": ("tiermem/engine.py", "from torch import cuda", find_kinds),
    "a device by name": ("tiermem/engine.py", "device = torch.device('cuda:0')", find_kinds),
    "a tensor's own method": ("swap/store.py", "def f(x):\n    return x.cuda()", find_kinds),
    "a comparison": ("tiermem/engine.py", "def f(x):\n    return x.device.type in ('cuda', 'xpu')", find_kinds),
    "no docstring": ("tiermem/bare.py", None, find_undescribed),
}


def write_tree(root: Path) -> None:
    """A good source tree in small."""
    files = {
        "swap/__init__.py": "",
        "swap/native.py": "import _tiermem_native",
        "swap/tier.py": "from tiermem.swap import store",
        "swap/store.py": "from tiermem.swap import native",
        "tiermem/__init__.py": "from tiermem.engine import Engine",
        "tiermem/engine.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tiermem import Engine",
        "swap/accelerator.py": "import torch\ntorch.cuda.synchronize()",
        "tiermem/config/__init__.py": "",
        "tiermem/config/gds.py": "def f(device):\n    return device.type == 'cuda'",
        "tools/__init__.py": "",
        "tools/peer_plain.py": "import torch\ntorch.cuda.synchronize()",
        "tools/cli.py": "from tiermem.swap import store\nprint('fine')",
    }
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""What it is."""\n{source}\n', "utf-8")


def test_a_good_tree_passes(tmp_path: Path) -> None:
    write_tree(tmp_path)
    modules = read_modules(tmp_path)
    for find in (find_upward_imports, find_prints, find_kinds, find_undescribed, find_cycle):
        assert find(modules) == []


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_tree_is_found(tmp_path: Path, fault: str) -> None:
    write_tree(tmp_path)
    name, source, find = BAD[fault]
    (tmp_path / name).write_text("x = 1\n" if source is None else f'"""What it is."""\n{source}\n', "utf-8")
    assert find(read_modules(tmp_path)) != []
