"""Are the names that users rely on still there? public_names.txt holds them all, one fact a line.

A line that is missing, or that says something else, is a user's program that breaks. A line that is
new is recorded by

    python tests/test_public_names.py         rewrites public_names.txt; its diff belongs to the commit

How the facts are found may change with the insides of tiermem. What the file says may not.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import enum
import importlib
import inspect
import io
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("public_names.txt")
PACKAGES = (
    "tiermem",
    "tiermem.checkpoint",
    "tiermem.checkpoint.zero_to_fp32",
    "tiermem.config",
    "tiermem.forecast",
    "tiermem.swap",
    "tiermem.utils",
    "tiermem.utils.zero_to_fp32",
    "tiermem.zero",
    "tiermem.zero.partition_parameters",
)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "."}},
}
COMMANDS = {
    "train": "train --config tiny.json --data text.txt --seq 16 --steps 2 --offload nvme --nvme . \
    --memory 700MiB",
    "plan": "plan --config ds.json --model tiny.json --seq 16 --flops 1T --nvme-rate 1,1",
    "bench adam": "bench adam --params 65536 --loops 1 --threads 1 --row fp32",
    "bench step": "bench step --path . --params 65536 --loops 1",
}
"""Commands that write figures, small enough to be run. bench io, ranks and curves take longer;
their own tests hold them."""


# ---- the facts of each kind ----------------------------------------------------------------------


def policy_fields() -> Iterator[str]:
    """Every field of OffloadPolicy and of the values in it, with its default."""
    import tiermem

    for value in (tiermem.OffloadPolicy, tiermem.Precision, tiermem.NvmePath, tiermem.IoSettings):
        for field in fields_of(value):
            yield f"{value.__name__}.{field}"


def config_keys() -> Iterator[str]:
    """Every key of a config with its default, and its other spellings."""
    from config_keys import catalogue, every_model

    for section in catalogue():
        for key in section.keys:
            yield f"{key.path} = {key.default}"
    for model in every_model():
        for name, field in model.model_fields.items():
            choices = getattr(
                field.validation_alias, "choices", [field.validation_alias or field.alias or name]
            )
            others = sorted({name, *map(str, choices)} - {model.path_of(name).rpartition(".")[2]})
            if others:
                yield f"{model.path_of(name)} is also {', '.join(others)}"


def commands() -> Iterator[str]:
    """Every command, with its options, their defaults and whether they are required."""
    import typer

    from tiermem.tools.cli import app

    def of(command: Any, words: str) -> Iterator[str]:
        yield words
        for name, each in sorted(getattr(command, "commands", {}).items()):
            yield from of(each, f"{words} {name}")
        for option in command.params:
            spelling = "/".join([*option.opts, *option.secondary_opts])
            marks = (
                [
                    mark
                    for mark, holds in (("required", option.required), ("several", option.multiple))
                    if holds
                ]
                if (option.param_type_name == "option")
                else [f"nargs={option.nargs}", *(["required"] if option.required else [])]
            )
            yield (
                f"{words} {spelling} = "
                f"{shown(option.default)}{''.join(f' ({mark})' for mark in marks)}"
            )

    yield from of(typer.main.get_command(app), "tiermem")


def exit_statuses() -> Iterator[str]:
    """Every constant of the tools whose name begins with EXIT_."""
    found = set()
    for file in sorted((ROOT / "tools").rglob("*.py")):
        for node in ast.parse(file.read_text("utf-8")).body:
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                for name, value in zip(names, values, strict=False):
                    if isinstance(name, ast.Name) and name.id.startswith("EXIT_"):
                        found.add(f"{name.id} = {ast.unparse(value)}")
    yield from found


def python_names() -> Iterator[str]:
    """Every public name of the packages, with parameters and their defaults; classes with their
    public members."""
    described: dict[int, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        offered = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and not isinstance(value, types.ModuleType)
            and is_ours(value)
        ]
        yield package
        for name in sorted(set(offered)):
            value = getattr(module, name)
            if isinstance(value, types.ModuleType):
                yield f"{package}.{name}"
            elif id(value) in described:
                yield f"{package}.{name} is {described[id(value)]}"
            else:
                described[id(value)] = f"{package}.{name}"
                yield from described_as(f"{package}.{name}", value)


def integrations() -> Iterator[str]:
    """Every name of the integrations that a page imports, with its parameters. Read from source:
    the libraries need not be here."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").rglob("*.py")]
    imported = re.compile(r"from (tiermem\.integrations\.\w+) import (\w+)")
    found = {names for page in pages for names in imported.findall(page.read_text("utf-8"))}
    for module, name in found:
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text("utf-8"))
        (node,) = [each for each in tree.body if getattr(each, "name", None) == name]
        is_function = isinstance(node, ast.FunctionDef)
        yield f"{module}.{name}{parameters_in(node) if is_function else ''}"


def described_as(name: str, value: Any) -> Iterator[str]:
    """One value: its parameters, and for a class its members."""
    if not inspect.isclass(value):
        yield f"{name}{parameters(value)}" if callable(value) else f"{name} = {shown(value)}"
        return
    if not is_ours(value):
        yield name
        return
    if issubclass(value, enum.Enum):
        yield from (f"{name}.{member} = {value[member].value!r}" for member in value.__members__)
    else:
        yield f"{name}{parameters(value)}"
    for member in sorted(dir(value)):
        owner = next((cls for cls in value.__mro__ if member in vars(cls)), object)
        if member.startswith("_") or not owner.__module__.startswith("tiermem"):
            continue
        found = inspect.getattr_static(value, member)
        if isinstance(found, classmethod | staticmethod):
            yield f"{name}.{member}{parameters(found.__func__)}"
        elif inspect.isfunction(found):
            yield f"{name}.{member}{parameters(found)}"
        elif not isinstance(found, enum.Enum):
            yield f"{name}.{member}"
    if dataclasses.is_dataclass(value):
        yield from (
            f"{name}.{field.name}"
            for field in dataclasses.fields(value)
            if not hasattr(value, field.name)
        )


def json_fields(folder: Path) -> Iterator[str]:
    """Every field of the JSON that the commands write, from small runs in `folder`. Blocks for
    seconds."""
    from tiermem.tools.cli import main

    (folder / "tiny.json").write_text(json.dumps(TINY))
    (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
    (folder / "text.txt").write_text("What is written here is learnt by a very small model. " * 200)
    for command, words in COMMANDS.items():
        said = io.StringIO()
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.chdir(folder)
            with pytest.raises(SystemExit) as end:
                main([*words.split(), "--json", "out.json"])
        assert end.value.code in (0, None), said.getvalue()
        out = folder / "out.json"
        yield from (f"{command}: {field}" for field in leaves(json.loads(out.read_text())))
        out.unlink()


# ---- how they are written ------------------------------------------------------------------------


def is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("tiermem")


def fields_of(value: Any) -> Iterator[str]:
    """The fields of a dataclass or NamedTuple, with their defaults."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            made = field.default_factory
            default = made() if made is not dataclasses.MISSING else field.default
            yield (
                field.name if default is dataclasses.MISSING else f"{field.name} = {shown(default)}"
            )
    else:
        for name in value._fields:
            yield (
                f"{name} = {shown(value._field_defaults[name])}"
                if name in value._field_defaults
                else name
            )


def parameters(value: Any) -> str:
    """The parameters of something that is called, without types."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    written, is_named = [], False
    for name, parameter in signature.parameters.items():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind == parameter.KEYWORD_ONLY and not is_named:
            written.append("*")
        is_named |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default)}"
        written.append(f"{star}{name}{default}")
    return f"({', '.join(written)})"


def parameters_in(node: ast.FunctionDef) -> str:
    """The parameters of a function in a syntax tree, without types."""
    given = node.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    return f"({ast.unparse(given)})"


def shown(value: Any) -> str:
    """A default, the same on every machine."""
    if isinstance(value, enum.Enum):
        return str(value.name)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    if inspect.isclass(value) or inspect.isroutine(value):
        return str(value.__qualname__)
    if type(value).__repr__ is object.__repr__:
        return type(value).__name__
    return " ".join(repr(value).split())


def leaves(value: Any, path: str = "") -> set[str]:
    """The fields of a JSON value; members of a list are one, and so are those of a table keyed by
    files or tensors."""
    if isinstance(value, list):
        return {f for each in value for f in leaves(each, f"{path}[]")} or {f"{path}[]"}
    if not isinstance(value, Mapping) or not value or path.rpartition(".")[2] in TABLES:
        return {path}
    found = set()
    for key, each in value.items():
        is_name = key.replace("_", "").isalnum() and not key[0].isdigit()
        name = key if is_name else "*"
        found |= leaves(each, f"{path}.{name}" if path else name)
    return found


# ---- the record ----------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "policy": policy_fields,
    "config": config_keys,
    "commands": commands,
    "exit statuses": exit_statuses,
    "integrations": integrations,
    "python": python_names,
}
MACHINE = ("device_memory", "gpu", "accelerator")
"""Fields that some machines have and others have not."""
TABLES = ("busy_s", "moved_bytes")
"""Fields that hold a table whose keys, lanes or edges and phases, depend on what was busy."""


def recorded(text: str) -> dict[str, list[str]]:
    """The lines of each kind."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            lines = found.setdefault(line[1:-1], [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


def complaint(due: list[str], now: list[str]) -> str:
    """What is new, gone or changed, as a diff; empty where nothing is."""
    due, now = sorted(set(due)), sorted(set(now))
    diff = [
        line
        for line in difflib.unified_diff(due, now, lineterm="", n=0)
        if line[:3] not in ("---", "+++", "@@ ")
    ]
    if not diff:
        return ""
    if not any(line.startswith("-") for line in diff):
        return "\n".join(["new: record it with `python tests/test_public_names.py`", *diff])
    return "\n".join(["gone or changed: users rely on it", *diff])


def without_empty(lines: list[str], others: list[str]) -> list[str]:
    """Leaves out a field that is null or empty on one side and has parts on the other: that is the
    machine's doing."""

    def has_part(whole: str, parts: list[str]) -> bool:
        return any(each != whole and each.startswith((f"{whole}.", f"{whole}[]")) for each in parts)

    wholes = [each for each in others if has_part(each.removesuffix("[]"), lines)]
    kept = [each for each in lines if not has_part(each.removesuffix("[]"), others)]
    return [
        each
        for each in kept
        if not any(has_part(whole.removesuffix("[]"), [each]) for whole in wholes)
    ]


@pytest.fixture(scope="module")
def due() -> dict[str, list[str]]:
    return recorded(RECORD.read_text("utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_public_names_are_as_recorded(due: dict[str, list[str]], kind: str) -> None:
    message = complaint(due[kind], list(KINDS[kind]()))
    assert not message, f"{kind}: {message}"


@pytest.mark.usefixtures("forked_python")
def test_json_fields_are_as_recorded(due: dict[str, list[str]], tmp_path: Path) -> None:
    found = [line for line in json_fields(tmp_path) if not any(word in line for word in MACHINE)]
    message = complaint(without_empty(due["json"], found), without_empty(found, due["json"]))
    assert not message, f"json: {message}"


@pytest.mark.parametrize(
    ("now", "starts"),
    [
        (["a", "b"], ""),
        (["a", "b", "c"], "new: record it"),
        (["a"], "gone or changed"),
        (["a", "b = 1"], "gone or changed"),
    ],
)
def test_a_difference_is_told(now: list[str], starts: str) -> None:
    message = complaint(["a", "b"], now)
    assert message.startswith(starts)
    assert bool(message) == bool(starts)


def record() -> None:
    """Rewrites public_names.txt."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        json_lines = [
            line for line in json_fields(Path(folder)) if not any(word in line for word in MACHINE)
        ]
    text = "# What users rely on. Written by tests/test_public_names.py, which says more.\n"
    for kind, lines in [
        *((kind, list(find())) for kind, find in KINDS.items()),
        ("json", json_lines),
    ]:
        text += f"\n[{kind}]\n" + "".join(f"{line}\n" for line in sorted(set(lines)))
    RECORD.write_text(text, "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "docs"))
    record()
