"""`tiermem fsck DIR`: what is in a store or a folder of checkpoints, which steps are durable, and what killed runs left.

    0    nothing is wrong
    1    a run was killed and has left its folder: resume it, or remove it with --remove; or a step's removal was cut short:
         --repair ends it
    2    the command cannot be done as it was asked for (as for every command), or not all could be looked at: this process
         lacks memory, threads, descriptors or a permission, as is said. Nothing is said against what it did not see
    3    something durable is broken or damaged; what else is whole is listed

What runs take on the disk is told by who needs it; together it is what stat says (checkpoint/space.py):

    durable    named by a durable step; a step's own bytes are those that no other one names
    live       written beside it by a run that goes on
    free       needed by nobody, or reserved and not written yet; unclear: free, but for a step that cannot be read
    records    manifests, parts, the lock, what is not ours

--verify reads every byte of every step and compares it with its checksum. --remove removes the folders of killed runs, after
naming them, and in them only files that runs make; one that holds a durable step goes only when its own folder is named.
--repair ends what was cut short before it looks: pointers of removed steps go, what killed saves left goes, and a `latest` that
is lost or names no tag names the newest whole one. It says what it does, and leaves folders alone that a run may save into.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiermem.tools.byte_size import format_bytes

if TYPE_CHECKING:
    from tiermem.checkpoint.survey import PathReport, RunReport, StepReport, Survey

MADE_BY = "tiermem fsck"
EXIT_DEAD, EXIT_UNREAD, EXIT_DAMAGED = 1, 2, 3
_SPACE = ("on the disk", "durable", "live", "free", "unclear", "records")
_STYLES = {"whole": "green", "live": "cyan", "kept": "green", "dead": "yellow", "unseen": "yellow"}
_STYLES |= {"removed": "yellow", "unread": "yellow"}


def fsck(
    where: Path,
    console: Console,
    verifies: bool = False,
    shows_json: bool = False,
    removes: bool = False,
    repairs: bool = False,
) -> int:
    """Prints what there is and returns the exit status. Blocks. Raises OSError when the folder cannot be looked at."""
    from tiermem.checkpoint.survey import repair, survey

    repaired = repair(survey(where)) if repairs else []
    if verifies and console.is_terminal and not shows_json:
        with console.status("verifying checksums") as status:
            found = survey(where, True, _counter(status))
    else:
        found = survey(where, verifies)
    removed = [str(run.folder) for run in removable(found) if _remove(run, console, shows_json)] if removes else []
    if shows_json:
        shown = {"made_by": MADE_BY, **_plain(dataclasses.asdict(found)), "removed": removed, "repaired": repaired}
        print(json.dumps(shown, indent=2))
    else:
        for each in repaired:
            console.print(Text(f"repaired {each}", style="yellow"))
        _print(found, console)
        _advise(found, console, removed)
    if found.is_damaged:
        return EXIT_DAMAGED
    if found.is_unread:
        return EXIT_UNREAD
    is_left = len(found.dead) > len(removed) or any(step.state == "removed" for step in found.steps)
    return EXIT_DEAD if is_left else 0


def removable(found: Survey) -> list[RunReport]:
    """Killed runs whose folders may go: those without a durable step, or the very folder that was named."""
    return [run for run in found.dead if run.folder == found.where or not found.steps_of(run.run_id)]


def _remove(run: RunReport, console: Console, is_silent: bool) -> bool:
    """Removes what a killed run left; whether the folder is gone."""
    from tiermem.swap.run_folder import RunFolder

    if not is_silent:
        console.print(Text(f"removing {run.folder}, left by {run.owner}", style="yellow"))
    RunFolder.claim(run.folder).close(keep=False)
    return not run.folder.exists()


def _counter(status: Any) -> Any:
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        status.update(f"verifying checksums: {format_bytes(done)}")

    return add


def _print(found: Survey, console: Console) -> None:
    if found.runs:
        table = _table(f"{found.where}: runs", ("folder", "state", "process", *_SPACE, "not ours"))
        for run in found.runs:
            table.add_row(
                _name(run.folder, found.where), _state(run.state), run.owner, *_sizes(run), ", ".join(run.unknown)
            )
        console.print(table)
    if len(found.runs) > 1:
        table = _table(f"{found.where}: paths", ("path", *_SPACE))
        for path in found.paths:
            table.add_row(str(path.path), *_sizes(path))
        console.print(table)
    if found.steps:
        columns = ("where", "tag", "step", "ranks", "tensors", "states", "durable", "own", "state", "")
        table = _table(f"{found.where}: durable steps", columns)
        for step in found.steps:
            table.add_row(*_cells(step, found.where))
        console.print(table)
    if not found.runs and not found.steps:
        console.print(Text(f"{found.where}: no run and no durable step"))
    for fault in found.faults:
        console.print(Text(fault, style="red"))
    for each in found.unread:
        console.print(Text(f"{each}: not looked at", style="yellow"))


def _cells(step: StepReport, where: Path) -> Iterable[str | Text]:
    numbers = (step.step, step.world, step.num_parameters)
    sizes = ["" if step.num_bytes is None else format_bytes(step.num_bytes), "", ""]
    if step.places:
        sizes[1:] = format_bytes(step.durable_bytes), format_bytes(step.own_bytes)
    state = f"{step.state}, verified" if step.is_verified else step.state
    tag = f"{step.tag} (latest)" if step.is_latest else step.tag or ""
    shown = ("" if number is None else str(number) for number in numbers)
    return (_name(step.place, where), tag, *shown, *sizes, _state(state), step.why)


def _advise(found: Survey, console: Console, removed: list[str]) -> None:
    for run in found.dead:
        if str(run.folder) in removed:
            continue
        steps = found.steps_of(run.run_id)
        if run.folder in [each.folder for each in removable(found)]:
            what = "no durable step: nothing can be resumed. --remove removes it"
        elif steps:
            newest = max(step.step or 0 for step in steps)
            what = f"step {newest} is durable: resume it, or remove it with tiermem fsck {run.folder} --remove"
        else:
            what = "its durable steps are not whole"
        console.print(Text(f"{run.folder}: {run.owner or 'a process'} was killed; {what}", style="yellow"))


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    right = (*_SPACE, "own", "step", "ranks", "tensors", "states")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _sizes(report: RunReport | PathReport) -> Iterable[str]:
    """The cells below _SPACE."""
    found = (report.file_bytes, report.durable_bytes, report.live_bytes, report.free_bytes, report.unclear_bytes)
    return map(format_bytes, (*found, report.record_bytes))


def _state(state: str) -> Text:
    return Text(state, style=_STYLES.get(state.split(",")[0], "red"))


def _name(path: Path, where: Path) -> str:
    """A path as short as it is clear."""
    return str(path.relative_to(where)) if path != where and path.is_relative_to(where) else str(path)


def _plain(value: Any) -> Any:
    """What JSON has."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
