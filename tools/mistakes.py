"""Mistakes: the answer to a command line that was typed wrongly: one sentence, and the command that
works.

    tiermem train --ofload nvme     ->     tiermem train: there is no option --ofload; write: tiermem train --offload nvme

typer finds what no command has: other words for commands and options, missing values. The
dataclasses of options.py and the jobs made of them find the rest, and raise a Mistake. Both know
which words to write instead of which.
"""

from __future__ import annotations

import difflib
import re
import shlex
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from tiermem.tools.presets import PRESETS
from tiermem.tools.words import Option, Options, options_of, value_of

PROGRAM = "tiermem"

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it cannot read: a class of its own copy of click, or of
click."""

EXAMPLES = {
    "--preset": "419m",
    "--offload": "nvme",
    "--memory": "auto",
    "--gpu-memory": "24GiB",
    "--host-memory": "64GiB",
    "--nvme-size": "1TB",
    "--pinned-memory": "32GiB",
    "--wear": "50TB",
    "--resident": "200MiB",
    "--sustained": "20%",
    "--link": "25GB",
    "--gpu-bandwidth": "800GB",
    "--near-network": "10GB",
    "--nvme-rate": "7,5",
    "--gpu": "4090",
    "--threads": "1",
    "--path": ".",
    "--nvme": "/mnt/nvme0",
    "--json": "out.json",
    "--csv": "out.csv",
    "--plot": "out.png",
    "--size": "2GiB",
    "--tbw": "600TB",
    "--flops": "150T",
    "--params": "128M",
    "--lr": "1e-4",
    "--frozen": "nf4",
    "--save": "checkpoints",
    "--config": "ds.json",
    "source": "deepspeed_checkpoint",
    "out": "out",
}
"""A value of an option, or of a word that has no option, where neither its default nor one of its
words is one."""

_COMMANDS = {
    "version": "--version", "help": "--help", "completion": "--install-completion", "run": "train", "finetune": "sft",
    "resume": "train --resume", "estimate": "plan", "verify": "fsck --verify", "convert": "export", "list": "inspect",
    "info": "check", "doctor": "check",
}  # fmt: skip
_ALIKE = (
    ("--path", "--nvme", "--nvme-path", "--dir", "--folder", "--disk"),
    ("--gpu-memory", "--vram"),
    ("--memory", "--host-memory", "--ram"),
    ("--ranks", "--gpus", "--num-gpus", "--numjobs"),
    ("--steps", "--max-steps", "--iterations"),
    (
        "--seq",
        "--seqlen",
        "--seq-len",
        "--sequence-length",
        "--max-length",
        "--context",
        "--resolution",
        "--max-seq-length",
    ),
    ("--lora", "--network-dim", "--lora-r", "--lora-rank"),
    ("--frozen", "--load-in-4bit", "--quantization"),
    ("--save", "--out", "--output", "--output-dir"),
    ("--precision", "--dtype"),
    ("--lr", "--learning-rate"),
    ("--config", "--deepspeed", "--deepspeed-config", "--ds-config"),
    ("--batch", "--batch-size", "--micro-batch-size"),
    ("--data", "--dataset"),
    ("--nvme-rate", "--rate"),
    ("--block", "--bs"),
    ("--mode", "--rw"),
)
"""Options of which a command has one at most, or none, and the words that people write for them.
A group holds options of one kind."""
_ALIKE_ENOUGH = 0.75
"""An option that is less like what was written is another option, not a slip of the pen."""
_UNKNOWN = re.compile(r"No such command '(.*?)'")
_EXTRA = re.compile(r"Got unexpected extra argument\S* \((.*)\)")


def answer(error: Any, given: Sequence[str]) -> str:
    """The line for a usage error of typer's: the command, what is wrong, and the command line to
    write instead."""
    context = error.ctx
    command = None if context is None else context.command
    options = _options_of(command)
    known = getattr(command, "commands", {})
    path = context.command_path if context is not None else f"{PROGRAM} {' '.join(given[:1])}"
    num_words = len(path.split()) - 1  # of the command
    unknown = _UNKNOWN.search(error.message)
    extra = _EXTRA.search(error.message)
    name = getattr(error, "option_name", None)
    parameter: Any = getattr(error, "param", None)
    first = "".join(given[num_words : num_words + 1])
    if name is not None and "--preset" in options and first and not first.startswith("-"):
        given = corrected(given, {first: _option_for(first, options)})
    said = error.message.rstrip(".")
    instead = dict[str, str]()
    if unknown:
        said = f"there is no command {unknown[1]!r}"
        meant = _COMMANDS.get(unknown[1]) or "".join(
            difflib.get_close_matches(unknown[1], known, 1)
        )
        if not meant:
            return _sentence(path, said, [*given[:num_words], "--help"])
        instead = {unknown[1]: meant}
    elif extra:
        word = max(filter(extra[1].startswith, given), key=len)
        said = f"{word!r} belongs to no option"
        instead = {word: _option_for(word, options)}
    elif name is not None and context is not None and name not in options:
        return _sentence(path, *_without(path, name, given, num_words, command))
    elif name is not None:
        instead = {name: f"{name} {example_of(path, name)}"}
    elif type(error).__name__ == "MissingParameter":
        said = f"{_name_of(parameter) or parameter.metavar or parameter.name} is missing"
        arguments = _arguments_of(command)
        missing = arguments[arguments.index(parameter) :] if parameter in arguments else [parameter]
        instead = {f"<{each.name}>": _with_example(path, each) for each in missing}
        if parameter not in arguments and first and not first.startswith("-"):
            instead = {first: _option_for(first, options)}
    elif parameter is not None:
        name = _name_of(parameter)
        said = f"{name}: {said}"
        instead = {name: _with_example(path, parameter)}
    return _sentence(path, said, corrected(given, instead))


def _without(
    path: str, name: str, given: Sequence[str], num_words: int, command: Any
) -> tuple[str, list[str]]:
    """What is wrong with an option that a command does not have, and the command line to write."""
    words = list(given)
    options = _options_of(command)
    if len(name) == 2 and name not in given:  # -p of -preset
        name = next((word for word in given if word.startswith(name)), name)
    said = f"there is no option {name}"
    known = getattr(command, "commands", {})
    value = value_of(name, words)
    written = {word.partition("=")[0] for word in words}
    for meant in _meant(name, options):
        if meant not in written and _takes(path, meant, value):
            return said, _renamed(words, name, meant)
    for each in ("train", "plan", *known):  # an option of a command, without the command
        if name in _options_of(known.get(each)):
            return f"{said} without a command", [*words[:num_words], each, *words[num_words:]]
    if name in _ALIKE[0] and _arguments_of(command):
        return said, [word.removeprefix(f"{name}=") for word in words if word != name]
    return said, [*words[:num_words], "--help"]


def corrected(given: Sequence[str], instead: Mapping[str, str]) -> list[str]:
    """The command line with other words, as for a shell, in place of an option and its value, or of
    a word; what is not there is added."""
    words = list[str]()
    left = dict(instead)
    position = 0
    while position < len(given):
        word = given[position]
        name, equals, _ = word.partition("=")
        position += 1
        if name not in instead:
            words.append(word)
            continue
        if (
            name.startswith("-")
            and not equals
            and position < len(given)
            and not re.match(r"-(?!\.?\d)", given[position])  # of a negative number it is a sign
        ):
            position += 1
        words += shlex.split(left.pop(name, ""))
    return [*words, *shlex.split(" ".join(left.values()))]


def write(given: Sequence[str]) -> str:
    """The end of an answer: the command line to write."""
    return f"write: {shlex.join([PROGRAM, *given])}"


def _sentence(command: str, said: str, words: Sequence[str]) -> str:
    return f"{command}: {said}; {write(words)}"


def _renamed(given: Sequence[str], name: str, other: str) -> list[str]:
    """The command line with an option under another name; with an example of its value where it is
    the last word."""
    words = [
        other + word[len(name) :] if word.partition("=")[0] == name else word for word in given
    ]
    return [*words, EXAMPLES[other]] if words[-1] == other and other in EXAMPLES else words


def _meant(name: str, options: Iterable[str]) -> Sequence[str]:
    """The options of a command that were probably meant, the likeliest first."""
    full = f"-{name}" if not name.startswith("--") else name.replace("_", "-")
    alike = next((group for group in _ALIKE if full in group), None)
    if alike is not None:
        return [each for each in alike if each in options]
    names = [each.strip("-") for each in options]
    near = difflib.get_close_matches(full.strip("-"), names, 1, _ALIKE_ENOUGH)
    return [f"--{each}" for each in near]


def _takes(path: str, name: str, value: str) -> bool:
    """Whether a command's option may have a value: a hint advises no option of another kind."""
    found = _option(path, name) if value else None
    if found is None:
        return True
    hint, said = found
    if "Path" in hint:
        return not value[0].isdigit()
    try:
        parsed = (said.parse or (float if re.search("float|int", hint) else str))(value)
        if said.check is not None:
            said.check(name, parsed)
    except ValueError:
        return False
    return True


def _option(path: str, name: str) -> tuple[str, Option] | None:
    """The type of a command's option, as text, and what the command line says of it."""
    bases: list[Any] = [Options, *Options.__subclasses__()]
    kinds = [each for base in bases for each in base.__subclasses__()]
    kind = next((each for each in kinds if path == each.MADE_BY), None)
    for field, said in options_of(kind).items() if kind else ():
        if said.name == name:
            return str(typing.get_type_hints(kind)[field]), said
    return None


def _options_of(command: Any) -> list[str]:
    return [
        name
        for parameter in getattr(command, "params", ())
        for name in parameter.opts
        if name.startswith("-")
    ]


def _arguments_of(command: Any) -> list[Any]:
    return [each for each in getattr(command, "params", ()) if not each.opts[0].startswith("-")]


def _option_for(word: str, options: Sequence[str]) -> str:
    """The option that a word without one probably belongs to, and the word."""
    if word.lower() in PRESETS and "--preset" in options:
        return f"--preset {word.lower()}"
    for name, fits in (
        ("--config", word.endswith(".json")),
        ("--model", Path(word).is_dir()),
        ("--path", True),
    ):
        if fits and name in options:
            return f"{name} {shlex.quote(word)}"
    return ""


def _name_of(parameter: Any) -> str:
    """An option's name; empty: an argument has none."""
    return next((each for each in parameter.opts if each.startswith("--")), "")


def _with_example(path: str, parameter: Any) -> str:
    """An option with a value, or a word in an argument's place."""
    name = _name_of(parameter)
    return f"{name} {example_of(path, name)}" if name else EXAMPLES.get(parameter.name, ".")


def example_of(path: str, name: str) -> str:
    """A value that a command's option may have."""
    hint, said = _option(path, name) or ("", Option(None, ""))
    default = "" if said.given in (None, ..., ()) else str(said.given)
    words = (default, *getattr(said.check, "allowed", ()), "FILE" if "Path" in hint else "10")
    return EXAMPLES.get(name) or next(filter(None, words))
