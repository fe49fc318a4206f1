"""Words: shared by all commands: byte sizes, exit statuses, stopping by signal, output files,
parsing of options."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

from tiermem.keys import given_twice
from tiermem.swap.base.errors import printable
from tiermem.swap.disk import durable

# ---- sizes as people write them ------------------------------------------------------------------
#
# KB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB and the bare letters K, M, G, T are powers
# of 1024.

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Reads a size. Raises ValueError that says what is allowed."""
    return _read(
        text, _UNITS, "is not a size; write bytes, or for example 1250MiB, 2GiB, 1.5G or 500MB"
    )


def parse_count(text: str) -> int:
    """Reads a number of things: "256M", "1.3b", "4096"; K, M and B are powers of 1000. Raises
    ValueError."""
    powers = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
    return _read(
        text, powers, "is not a number of parameters; write for example 256M, 1.3B or 4096"
    )


def parse_share(text: str) -> float:
    """Reads a part of a whole: "20%". Raises ValueError for less than 1 % and for more than 90
    %."""
    try:
        share = float(text.strip().removesuffix("%")) / 100 if text.strip().endswith("%") else 0.0
    except ValueError:
        share = 0.0
    if not 0.01 <= share <= 0.9:
        raise ValueError(f"{text!r} is no part of the free space; write 1% to 90%, such as 20%")
    return share


def _read(text: str, units: Mapping[str, int], wrong: str) -> int:
    match = _PATTERN.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} {wrong}")
    return int((float if "." in match[1] else int)(match[1]) * units[match[2].lower()])


def parse_flops(text: str) -> float:
    """Reads operations a second: "150T", "2.5P", "300G", "1e14"; G, T and P are powers of 1000.
    Raises ValueError."""
    power = {"g": 1e9, "t": 1e12, "p": 1e15}.get(text[-1:].lower())
    try:
        return float(text) if power is None else float(text[:-1]) * power
    except ValueError:
        raise ValueError(
            f"{text!r} is no number of operations a second; write for example 150T, 2.5P or 1e14"
        ) from None


def parse_list(option: str, text: str, parse: Callable[[str], Any] = str) -> tuple[Any, ...]:
    """Reads "256KiB,1MiB" with a parser for each part; each is kept once. Raises ValueError naming
    the option."""
    found = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        try:
            found.append(parse(part))
        except ValueError:
            kind = "a size, such as 1MiB" if parse is parse_bytes else "a whole number"
            raise ValueError(f"{option}: {part!r} is not {kind}") from None
    return tuple(dict.fromkeys(found))


def format_bytes(num_bytes: float) -> str:
    """A size for people: MiB up to 10 GiB, so that figures of one run compare; "1250.0 MiB", "19.53
    GiB"."""
    if abs(num_bytes) < 10 << 10:
        return f"{num_bytes:.0f} B"
    if abs(num_bytes) < 1 << 20:
        return f"{num_bytes / (1 << 10):.1f} KiB"
    if abs(num_bytes) < 10 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"


def numbered(number: float, word: str) -> str:
    """A number of things: "1 step", "2 steps", "1,200 batches"."""
    ending = "" if number == 1 else "es" if word.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {word}{ending}"


def format_seconds(seconds: float) -> str:
    """A stretch of time for people: "40 s", "12 minutes", "3.2 hours", "5.1 days"."""
    for unit, size in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{0 if unit == 'minute' else 1}f} {unit}s"
    return f"{seconds:.0f} s"


# ---- mistakes ------------------------------------------------------------------------------------


class Mistake(ValueError):
    """What cannot be, with the words that would do.

    instead: by an option or a word of the command line, the words to write in place of it and its
        value, as for a shell. One that is not there is added (mistakes.py).
    """

    def __init__(self, message: str, instead: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.instead = dict(instead or {})  # without: of a copy, which gets it afterwards


_OTHER_WORDS = {
    "disk": "nvme", "ssd": "nvme", "ram": "cpu", "memory": "cpu", "host": "cpu", "gpu": "none", "cuda": "none",
    "bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32", "full": "fp32",
}  # fmt: skip


def closest(word: str, allowed: Iterable[str]) -> str:
    """The allowed word that was probably meant; the first of them when none is near."""
    there = list(allowed)
    meant = _OTHER_WORDS.get(word.lower(), word.lower())
    return (difflib.get_close_matches(meant, there, 1, 0.4) or there)[0]


def value_of(name: str, words: Sequence[str]) -> str:
    """The value that was written behind an option; empty: none was."""
    for word, after in itertools.pairwise([*words, "-"]):
        option, equals, value = word.partition("=")
        if option == name:
            return value if equals or after.startswith("-") else after
    return ""


# ---- exit statuses -------------------------------------------------------------------------------
#
# 0 done    1 the command's own verdict, or a failure    2 the user must change something
# 130 stopped by Ctrl-C

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130


# ---- stopping: SIGTERM unwinds like Ctrl-C, so that a command removes the files that it made -----


Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextlib.contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Within: signals are handled as said, afterwards as before. Elsewhere than in the main thread
    nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_by_sigterm() -> contextlib.AbstractContextManager[None]:
    """Within: SIGTERM raises KeyboardInterrupt."""
    return handling({signal.SIGTERM: signal.default_int_handler})


class Stop:
    """Whether Ctrl-C was pressed since training began, by SIGINT's handler."""

    def __init__(self) -> None:
        self.is_asked = False
        self.may_unwind = True  # nothing has been trained yet: an interrupt may end it anywhere

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGINT."""
        self.is_asked = True
        if self.may_unwind:
            raise KeyboardInterrupt


def message_of(error: Exception) -> str:
    """What an error says, with the file that it is about."""
    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror or error}")
    return printable(str(error)) or type(error).__name__


# ---- outputs and their marks ---------------------------------------------------------------------
#
# A file that exists is overwritten only when the same command made it. The mark differs with the
# kind of file:
#
#     .json   the key "made_by" at the top:         {"made_by": "tiermem bench step", ...}
#     .csv    the first line:                       # made by tiermem bench step
#     .png    the text "Software" in its header:    figure.savefig(file, metadata={"Software": "tiermem bench step"})
#
# A command checks its output files before it measures.

_HEADER_BYTES = 1 << 16  # matplotlib writes its texts right behind the picture's size


def check_outputs(paths: Iterable[Path | None], made_by: str) -> None:
    """Sees that every file can be written. None stands for an output that was not asked for.

    Raises FileExistsError for a file that `made_by` did not make, FileNotFoundError or
    PermissionError for a folder that is missing or closed to us, ValueError when two outputs are
    one file.
    """
    wanted = [path for path in paths if path is not None]
    if len({path.resolve() for path in wanted}) < len(wanted):
        raise ValueError(
            f"two outputs are one file: {', '.join(map(str, wanted))}; give each a name of its own"
        )
    for path in wanted:
        _check_folder(path)
        if (path.exists() or path.is_symlink()) and not _is_made_by(path, made_by):
            raise FileExistsError(
                errno.EEXIST,
                f"not made by {made_by!r}, so it is not overwritten: move it, or name another",
                str(path),
            )


def save_json(file: Path, content: Any, allows_nan: bool = True) -> None:
    """Writes JSON whole, so that a reader never sees a part; paths become texts.

    Raises OSError, and ValueError for a NaN.
    """
    text = json.dumps(content, indent=1, allow_nan=allows_nan, default=os.fspath)
    durable.write_file(file, (text + "\n").encode())


def read_json(file: Path) -> Any:
    """What a JSON file holds. Raises OSError, and ValueError that names the file, also for a key
    that an object has twice."""
    repeated: list[str] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.extend(given_twice(pairs))
        return dict(pairs)

    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=noted)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(f"{file} is not JSON: {error}") from None
    if repeated:
        raise ValueError(
            f"{file}: {', '.join(repeated)} appears twice in one object; keep one of them"
        )
    return content


def csv_mark(made_by: str) -> str:
    """The first line of a CSV file, without its end."""
    return f"# made by {made_by}"


def _check_folder(path: Path) -> None:
    durable.check_folder(path.parent, f": make it first, or correct {path.name}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{path.name} cannot be written here", str(path.parent))


def _is_made_by(path: Path, made_by: str) -> bool:
    if not path.is_file():
        return False
    try:
        if path.suffix == ".json":
            content = read_json(path)
            return isinstance(content, dict) and content.get("made_by") == made_by
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except (OSError, ValueError):  # not readable, or no JSON: not ours
        return False
    if path.suffix == ".csv":
        return header.splitlines()[:1] == [csv_mark(made_by).encode()]
    return header.startswith(b"\x89PNG") and b"tEXtSoftware\0" + made_by.encode() in header


Check = Callable[[str, Any], object]
_FEW_GIB = 512


STDOUT = Path("-")
"""What `--json` without a file stands for."""
SCHEMA_VERSION = 1
"""Of what --json gives (docs/json.md): it grows when a key goes or means something else."""


# ---- options: the fields of a command's dataclass ------------------------------------------------


class Option(NamedTuple):
    """How the command line says a field."""

    given: Any
    """The default as a person would write it; ... where the option is required."""
    help: str
    name: str = "--"
    """Such as "--size"; empty for an argument, which has a place and no name; "--": as the
    field's."""
    parse: Callable[[Any], Any] | None = None
    check: Check | None = None
    """Raises for a value that is not None."""
    metavar: str | None = None
    shows_default: bool = True


def option(*said: Any, **more: Any) -> Any:
    """A field of a command's dataclass; the arguments are those of Option."""
    given, _, _, parse, *_ = made = Option(*said, **more)
    if given is ...:
        return dataclasses.field(metadata={"option": made})
    default = parse(given) if parse and given is not None else given
    return dataclasses.field(default=default, metadata={"option": made})


def options_of(kind: Any) -> dict[str, Option]:
    """The options of a dataclass, by the name of the field."""
    fields = [each for each in dataclasses.fields(kind) if "option" in each.metadata]
    fields.sort(key=lambda each: each.kw_only is True)  # those of every command are listed last
    said = {field.name: field.metadata["option"] for field in fields}
    return {
        field: each._replace(name=f"--{field.replace('_', '-')}") if each.name == "--" else each
        for field, each in said.items()
    }


def several(
    given: Any, help: str, name: str, parse: Callable[[str], Any] = str, check: Check | None = None
) -> Any:
    """A field that is an option with values between commas, at least one."""
    return option(given, help, name, partial(parse_list, name, parse=parse), check or each_of)


def size(given: Any, help: str, name: str, check: Check | None = None) -> Any:
    """A field that is an option with a size in bytes."""
    return option(given, help, name, parse_bytes, check)


def _json_file(name: str, value: Path) -> None:
    if value != STDOUT:
        ends_in(".json")(name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The base of every command's dataclass: looks at the values as their fields say, then at the
    files to be written."""

    json_file: Path | None = option(  # noqa: RUF009  (option is dataclasses.field)
        None,
        "print the result as one JSON object, or write it into this .json file",
        "--json",
        check=_json_file,
    )
    is_debug: bool = option(False, "show tracebacks and what a trainer prints", "--debug")

    MADE_BY: ClassVar[str] = ""
    """The mark in the command's own files, which it may overwrite; empty: it writes none that are
    marked."""
    TAKES_MORE: ClassVar[bool] = False
    """Whether words that are no options of ours go to the field `arguments`."""

    def __post_init__(self) -> None:
        for field, said in options_of(self).items():
            value = getattr(self, field)
            if said.check is not None and value is not None:
                said.check(said.name, value)
        for field, package in (("plot_file", "matplotlib"), ("tensorboard", "tensorboard")):
            if getattr(self, field, None) is not None and importlib.util.find_spec(package) is None:
                needing = options_of(self)[field].name
                raise Mistake(
                    f"{needing} needs {package}, which is not installed: pip install {package}",
                    {needing: ""},
                )
        if self.MADE_BY:
            outputs = [getattr(self, name, None) for name in ("json_file", "csv_file", "plot_file")]
            check_outputs([each for each in outputs if each != STDOUT], self.MADE_BY)
        self.check_together()

    def check_together(self) -> None:
        """Raises ValueError for values that contradict each other; a command overrides it."""

    def given(self, *fields: str) -> list[str]:
        """The names of those of some options that were given."""
        said = options_of(self)
        return [said[field].name for field in fields if getattr(self, field) not in (None, ())]

    def take_old(self, old: str, new: str, why: str) -> None:
        """Moves the value of an option's old use to another field, and says so on stderr. Nothing
        where the old one is not given, or the other is."""
        if getattr(self, old) is None or getattr(self, new) is not None:
            return
        name = options_of(self)[old].name
        print(f"{self.MADE_BY}: {name} {getattr(self, old)}: {why}", file=sys.stderr)
        object.__setattr__(self, new, getattr(self, old))
        object.__setattr__(self, old, None)

    def report(self, machine: Mapping[str, Any], since_s: float, **figures: Any) -> dict[str, Any]:
        """Figures with what was asked for, on which machine, and how long it took since a moment of
        time.monotonic()."""
        return {
            "machine": machine,
            "options": {**vars(self)},
            "seconds": time.monotonic() - since_s,
            **figures,
        }

    @property
    def prints_json(self) -> bool:
        """Whether stdout is for one JSON object alone."""
        return self.json_file == STDOUT

    def save_json(self, figures: Mapping[str, Any], allows_nan: bool = True) -> None:
        """Writes figures with the command's mark to --json, or prints them, where it was given.
        Raises OSError, ValueError for a NaN."""
        content = {"made_by": self.MADE_BY, "schema_version": SCHEMA_VERSION, **figures}
        if self.prints_json:
            print(json.dumps(content, indent=1, allow_nan=allows_nan, default=os.fspath))
        elif self.json_file is not None:
            save_json(self.json_file, content, allows_nan)


# ---- checks of a field's value -------------------------------------------------------------------


def at_least(least: float, shown: Callable[[float], str] = str) -> Check:
    def check(name: str, value: Any) -> None:
        if value < least:
            raise Mistake(
                f"{name} is {shown(value)}; it must be at least {shown(least)}",
                {name: f"{name} {shown(least).replace(' ', '')}"},
            )

    return check


def above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be more than 0")


def from_to(least: int, most: int | Callable[[], int], what: str = "") -> Check:
    """A number, or numbers, in a range."""

    def check(name: str, value: Any) -> None:
        top = most() if callable(most) else most
        for each in each_of(name, value):
            if not least <= each <= top:
                raise Mistake(
                    f"{name} is {each}; allowed are {least} to {top}{what}",
                    {name: f"{name} {min(max(each, least), top)}"},
                )

    return check


class OneOf:
    """One of some words, or several of them."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    def __call__(self, name: str, value: Any) -> None:
        for each in each_of(name, value):
            if each not in self.allowed:
                raise Mistake(
                    f"{name} is {each!r}; allowed are {', '.join(self.allowed)}",
                    {name: f"{name} {closest(each, self.allowed)}"},
                )


def memory_of(least_bytes: int, why: str = "") -> Check:
    """A size of memory. A bare number was probably meant in MiB, a small one in GiB."""

    def check(name: str, value: Any) -> None:
        if value == 0:
            raise Mistake(f"{name} is 0: leave it out", {name: ""})
        if value < least_bytes:
            meant = (
                f"{value}GiB" if value < _FEW_GIB else f"{value}MiB" if value < 1 << 20 else "1GiB"
            )
            raise Mistake(
                f"{name} is {value} bytes{why}: give {format_bytes(least_bytes)} or more, with "
                "the unit",
                {name: f"{name} {meant}"},
            )

    return check


def ends_in(suffix: str) -> Check:
    def check(name: str, value: Path) -> None:
        if value.suffix != suffix:
            raise ValueError(f"{name}: {value} must end in {suffix}")

    return check


def program(name: str, value: Path) -> None:
    if not (value.is_file() and os.access(value, os.X_OK)):
        hint = "; `make yardsticks` builds it" if name == "--yardstick" else ""
        raise FileNotFoundError(errno.ENOENT, f"{name}: no such program{hint}", str(value))


def folders(name: str, value: Sequence[Path]) -> None:
    for path in each_of(name, value):
        durable.check_folder(path, f": make it first, or correct {name}")
    if len({path.resolve() for path in value}) < len(value):
        raise ValueError(f"{name} names a folder twice: {', '.join(map(str, value))}")


def each_of(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"{name} is empty; give at least one")
        return value
    return [value]
