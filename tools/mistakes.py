"""Mistakes: the answer to a command line that was typed wrongly: one sentence, and the command that works.

    tiermem train --ofload nvme     ->     tiermem train: there is no option --ofload; write: tiermem train --offload nvme

typer finds what no command has: other words for commands and options, missing values. The dataclasses of options.py and the
jobs made of them find the rest, and raise a Mistake. Both know which words to write instead of which.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from tiermem.tools.presets import PRESETS
from tiermem.tools.words import closest

PROGRAM = "tiermem"

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it cannot read: a class of its own copy of click, or of click."""

EXAMPLES = {
    "--preset": "419m",
    "--offload": "nvme",
    "--memory": "auto",
    "--gpu-memory": "24GiB",
    "--host-memory": "64GiB",
    "--nvme-size": "1TB",
    "--size": "2GiB",
    "--tbw": "600TB",
    "--flops": "150T",
    "--params": "128M",
}
"""A value of an option that has no default to show."""

_COMMANDS = {"version": "--version", "help": "--help", "run": "train", "finetune": "train", "estimate": "plan"}
_OPTIONS = {
    "--gpu": "--gpu-memory",
    "--epochs": "--steps",
    "--seqlen": "--seq",
    "--output": "--save",
    "--out": "--save",
}
_IN_PLAN = {"--memory": "--host-memory", "--ram": "--host-memory", "--gpus": "--ranks", "--nvme": "--offload"}
_IN_TRAIN = {"--ram": "--memory", "--host-memory": "--memory", "--dtype": "--precision", "--path": "--nvme"}
_UNKNOWN = re.compile(r"No such command '(.*?)'")
_EXTRA = re.compile(r"Got unexpected extra argument\S* \((.*?)\)")


def answer(error: Any, given: Sequence[str]) -> str:
    """The line for a usage error of typer's: the command, what is wrong, and the command line to write instead."""
    context = error.ctx
    command = None if context is None else context.command
    options, known = _options_of(command), getattr(command, "commands", {})
    path = context.command_path if context is not None else f"{PROGRAM} {' '.join(given[:1])}"
    unknown, extra = _UNKNOWN.search(error.message), _EXTRA.search(error.message)
    name: str | None = getattr(error, "option_name", None)
    parameter = getattr(error, "param", None)
    if name is not None and "--preset" in options and len(given) > 1 and not given[1].startswith("-"):
        given = corrected(given, {given[1]: _option_for(given[1], options)})
    said, instead = error.message.rstrip("."), dict[str, str]()
    if unknown:
        said = f"there is no command {unknown[1]!r}"
        instead = {unknown[1]: _COMMANDS.get(unknown[1]) or closest(unknown[1], known)}
    elif extra:
        word = extra[1].split()[0]
        said = f"{word!r} belongs to no option"
        instead = {word: _option_for(word, options)}
    elif name is not None and context is not None and name not in options:
        said = f"there is no option {name}"
        if known:  # an option of a command, without the command
            best = next((each for each in ("train", "plan") if name in _options_of(known.get(each))), "train")
            return _sentence(path, f"{said} without a command", [best, *given])
        more = _IN_PLAN if context.info_name == "plan" else _IN_TRAIN
        return _sentence(
            path, said, _renamed(given, name, more.get(name) or _OPTIONS.get(name) or closest(name, options))
        )
    elif name is not None:
        instead = {name: f"{name} {EXAMPLES.get(name, '10')}"}
    elif parameter is not None:
        name, example = _named(parameter)
        if type(error).__name__ == "MissingParameter":
            said = f"{name or parameter.metavar or parameter.name} is missing"
        else:
            said = f"{name}: {said}"
        instead = {name or "": f"{name} {example}".strip()}
    return _sentence(path, said, corrected(given, instead))


def corrected(given: Sequence[str], instead: Mapping[str, str]) -> list[str]:
    """The command line with other words in place of an option and its value, or of a word; what is not there is added."""
    words, left = list[str](), dict(instead)
    position = 0
    while position < len(given):
        word = given[position]
        name, equals, _ = word.partition("=")
        position += 1
        if name not in instead:
            words.append(word)
            continue
        if name.startswith("-") and not equals and position < len(given) and not given[position].startswith("-"):
            position += 1
        words += left.pop(name, "").split()
    return [*words, *(each for more in left.values() for each in more.split())]


def write(given: Sequence[str]) -> str:
    """The end of an answer: the command line to write."""
    return f"write: {shlex.join([PROGRAM, *given])}"


def _sentence(command: str, said: str, words: Sequence[str]) -> str:
    return f"{command}: {said}; {write(words)}"


def _renamed(given: Sequence[str], name: str, other: str) -> list[str]:
    """The command line with an option under another name; with an example of its value where it is the last word."""
    words = [other + word[len(name) :] if word.partition("=")[0] == name else word for word in given]
    return [*words, EXAMPLES[other]] if words[-1] == other and other in EXAMPLES else words


def _options_of(command: Any) -> list[str]:
    return [name for parameter in getattr(command, "params", ()) for name in parameter.opts if name.startswith("-")]


def _option_for(word: str, options: Sequence[str]) -> str:
    """The option that a word without one probably belongs to, and the word."""
    if word.lower() in PRESETS and "--preset" in options:
        return f"--preset {word.lower()}"
    for name, fits in (("--config", word.endswith(".json")), ("--model", Path(word).is_dir()), ("--path", True)):
        if fits and name in options:
            return f"{name} {word}"
    return ""


def _named(parameter: Any) -> tuple[str, str]:
    """An option's name (empty: an argument has none), and an example of its value."""
    name = next((each for each in parameter.opts if each.startswith("--")), "")
    default = parameter.default if isinstance(parameter.default, (int, float, str)) else None
    return name, EXAMPLES.get(name) or (str(default) if default else "." if not name or name == "--path" else "10")
