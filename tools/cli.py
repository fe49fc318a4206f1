"""The command line: `tiermem train`, `sft`, `plan`, `check`, `tune`, `fsck`, `inspect`, `import`, `export`
and `bench`.

A user's mistake prints one line on stderr, with the command to write instead where one is known
(mistakes.py), and ends with exit status 2; --debug shows the traceback. Large packages are imported
only when a command needs them: torch belongs to the trainer's process.
"""

from __future__ import annotations

import collections.abc
import contextlib
import importlib
import inspect
import itertools
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

import tiermem
from tiermem.tools import options
from tiermem.tools.job.train_job import LIST_OF_STEPS
from tiermem.tools.mistakes import PROGRAM, UsageError, answer, corrected, example_of, write
from tiermem.tools.presets import PRESETS
from tiermem.tools.words import (
    EXIT_INTERRUPTED,
    EXIT_USER,
    STDOUT,
    Mistake,
    message_of,
    options_of,
    stopped_by_sigterm,
)

_OF_FOLDERS = ("fsck", "inspect", "import", "export")
_LISTS = ("--nvme", "--data", "--path")

app = typer.Typer(
    help="Train models whose states do not fit in memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure what this machine reaches.", no_args_is_help=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `tiermem` program; ends the process with its exit status."""
    run_app(app, PROGRAM, sys.argv[1:] if arguments is None else arguments)


def run_app(group: typer.Typer, program: str, arguments: Sequence[str]) -> None:
    """Runs the commands of a program; ends the process with its exit status."""
    given = list(arguments)
    try:
        status = group(
            args=spread_lists(_with_values(given)),
            prog_name=program,
            standalone_mode=False,
            obj=given,
        )
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
        else:
            print(answer(error, given), file=sys.stderr)
        status = EXIT_USER
    except typer.Abort:  # the end of a terminal's input
        status = EXIT_INTERRUPTED
    sys.exit(status)


def _with_values(arguments: Sequence[str]) -> list[str]:
    """What options without a value stand for: `--resume`, for the list of what there is; `--json`
    without a .json file, for stdout."""
    words = list[str]()
    for word, after in itertools.pairwise([*arguments, "-"]):
        words.append(word)
        if word == "--resume" and after.startswith("-"):
            words.append(LIST_OF_STEPS)
        elif word == "--json" and after != str(STDOUT) and not _is_file(after, arguments[0]):
            words.append(str(STDOUT))
    if words[-1:] == ["--json"]:
        words.append(str(STDOUT))
    return words


def _is_file(word: str, command: str) -> bool:
    """Whether a word after `--json` is its file: in commands that take a folder, by its ending."""
    return word.endswith(".json") or (command not in _OF_FOLDERS and not word.startswith("-"))


def spread_lists(arguments: Sequence[str]) -> list[str]:
    """`--nvme A B` as `--nvme A --nvme B`: words after an option that takes several belong to
    it."""
    spread: list[str] = []
    option: str | None = None
    has_value = False
    for word in arguments:
        if word.startswith("-"):
            option = word if word in _LISTS else None
            has_value = False
        elif option is not None:
            if has_value:
                spread.append(option)
            has_value = True
        spread.append(word)
    return spread


def register(
    group: typer.Typer,
    kind: Any,
    work: str,
    stopped: str | None = "stopped; nothing was written",
) -> None:
    """Makes a command of a dataclass of options.

    Args:
        group: gets the command, under the last word of the dataclass's mark.
        work: the module and the function that is called with the options and a console, and returns
            the exit status.
        stopped: what is said after Ctrl-C or SIGTERM, unless the function's KeyboardInterrupt says
            it; None: the function answers them itself.
    """

    def run(context: typer.Context, **given: Any) -> None:
        from tiermem.tools.record.reports import open_console

        module, _, name = work.rpartition(".")
        if kind.TAKES_MORE:
            given["arguments"] = tuple(context.args)
        try:
            made = _made(kind, given)
            function = getattr(importlib.import_module(module), name)
            with contextlib.nullcontext() if stopped is None else stopped_by_sigterm():
                status = function(made, open_console(made.prints_json))
        except (ValueError, OSError) as error:
            status = refuse(kind.MADE_BY, error, given["is_debug"], context.obj)
        except KeyboardInterrupt as interrupt:
            if stopped is None:
                raise
            print(f"{kind.MADE_BY}: {str(interrupt) or stopped}", file=sys.stderr)
            status = EXIT_INTERRUPTED
        raise typer.Exit(status)

    ours = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    run.__signature__ = inspect.Signature([ours, *_parameters_of(kind)])  # type: ignore[attr-defined]
    run.__doc__ = kind.__doc__
    more = {"allow_extra_args": kind.TAKES_MORE, "ignore_unknown_options": kind.TAKES_MORE}
    group.command(kind.MADE_BY.split()[-1], context_settings=more)(run)


def refuse(words: str, error: Exception, is_debug: bool, given: Sequence[str]) -> int:
    """One line for the user, and the traceback when asked for; returns the exit status."""
    if is_debug:
        traceback.print_exception(error)
    said = " ".join(message_of(error).split())
    if isinstance(error, Mistake):
        said += f"; {write(corrected(given, error.instead))}"
    print(f"{words}: {said}", file=sys.stderr)
    return EXIT_USER


def _parameters_of(kind: Any) -> Iterator[inspect.Parameter]:
    """typer's parameters for the fields of a dataclass of options.py."""
    hints = typing.get_type_hints(kind)
    for field, said in options_of(kind).items():
        hint = hints[field]
        default = said.given
        if said.parse is not None:  # a text, or a flag
            hint = str | None if default is None else type(default)
        elif typing.get_origin(hint) is collections.abc.Sequence:
            hint = list[typing.get_args(hint)]  # type: ignore[misc]
            if default is not ...:
                hint |= None
                default = None
        shown: Any
        if said.name:
            words = PRESETS if field == "preset" else getattr(said.check, "allowed", None)
            complete = None if words is None else _completions(tuple(words))
            shown = typer.Option(
                said.name, help=said.help, show_default=said.shows_default, autocompletion=complete
            )
        else:
            shown = typer.Argument(help=said.help, metavar=said.metavar)
        yield inspect.Parameter(
            field,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is ... else default,
            annotation=Annotated[hint, shown],
        )


def _completions(words: Sequence[str]) -> Callable[[str], list[str]]:
    """What a shell offers for the beginning of an option's value."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def _made(kind: Any, given: dict[str, Any]) -> Any:
    """The dataclass of what was given on the command line. Raises ValueError and OSError for values
    that cannot be."""
    for field, said in options_of(kind).items():
        if said.parse is not None and given[field] is not None:
            try:
                given[field] = said.parse(given[field])
            except ValueError as error:
                example = example_of(kind.MADE_BY, said.name)
                raise Mistake(
                    f"{said.name}: {error}", {said.name: f"{said.name} {example}"}
                ) from None
        elif said.given == ():
            given[field] = tuple(given[field] or ())
    return kind(**given)


# ---- the commands --------------------------------------------------------------------------------


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"{PROGRAM} {tiermem.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="show the version", is_eager=True, callback=_show_version
    ),
) -> None:
    """Train models whose states do not fit in memory."""


_STOPPED = "stopped; nothing is left on the paths"

register(app, options.TrainOptions, "tiermem.tools.train.train.train", None)
register(app, options.SftOptions, "tiermem.tools.train.train.sft", None)
register(app, options.PlanOptions, "tiermem.tools.plan.plan.plan")
register(app, options.CheckOptions, "tiermem.tools.check.check")
register(app, options.TuneOptions, "tiermem.tools.tune.tune")
register(
    app,
    options.FsckOptions,
    "tiermem.tools.checkpoints.fsck",
    "stopped; nothing was changed",
)
register(app, options.InspectOptions, "tiermem.tools.checkpoints.inspect_checkpoint")
register(app, options.ImportOptions, "tiermem.tools.checkpoints.import_checkpoint")
register(app, options.ExportOptions, "tiermem.tools.checkpoints.export_checkpoint")
register(bench, options.IoBenchOptions, "tiermem.tools.bench.io.bench_io", _STOPPED)
register(bench, options.AdamBenchOptions, "tiermem.tools.bench.adam.bench_adam")
register(bench, options.StepBenchOptions, "tiermem.tools.bench.step.bench_step", _STOPPED)

app.add_typer(bench, name="bench")

if __name__ == "__main__":
    main()
