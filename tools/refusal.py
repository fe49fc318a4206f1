"""Refusal: how every command tells the user what to change: one line on stderr, and an exit status.

0 done    1 the command's own verdict    2 the user must change something    130 stopped by Ctrl-C
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator

import typer

EXIT_USER, EXIT_INTERRUPTED = 2, 130


@contextlib.contextmanager
def refusing(
    command: str,
    is_debug: bool,
    stopped: str | None = None,
    errors: tuple[type[Exception], ...] = (ValueError, OSError),
) -> Iterator[None]:
    """Turns what a command's user must change into one line and EXIT_USER, and Ctrl-C into `stopped`, where that is given."""
    try:
        yield
    except errors as error:
        raise typer.Exit(refuse(command, error, is_debug)) from None
    except KeyboardInterrupt:
        if stopped is None:
            raise
        print(f"tiermem {command}: {stopped}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def refuse(command: str, error: Exception, is_debug: bool) -> int:
    """One line for the user, and the traceback when asked for."""
    if is_debug:
        traceback.print_exception(error)
    message = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror or error}"
    print(f"tiermem {command}: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER
