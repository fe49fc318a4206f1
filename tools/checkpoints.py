"""The commands on checkpoints: `tiermem fsck`, `inspect`, `import` and `export`."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.segment import Segment, Segments
from rich.text import Text

from tiermem.checkpoint.format.fields import no_collection
from tiermem.checkpoint.format.manifest import Manifest, Parameter
from tiermem.checkpoint.interchange.foreign import Foreign
from tiermem.checkpoint.interchange.write import read_foreign, write_checkpoint
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.survey import PathReport, RunReport, StepReport, Survey, repair, survey
from tiermem.checkpoint.zero_to_fp32 import dtype_of
from tiermem.swap.base.errors import printable
from tiermem.swap.disk.run_folder import RunFolder, has_saved
from tiermem.tools.job.train_job import CLIENT_KEY, options_to_save
from tiermem.tools.options import (
    ExportOptions,
    FsckOptions,
    ImportOptions,
    InspectOptions,
    TrainOptions,
)
from tiermem.tools.record.reports import table
from tiermem.tools.words import format_bytes, numbered, read_json

# ---- tiermem fsck DIR ----------------------------------------------------------------------------
#
# Exit status:
#
#     0    no problem was found
#     1    a killed run left its folder: resume it, or remove it with --remove; or the removal of a step was interrupted:
#          --repair completes it
#     2    wrong options (as for every command), or --repair while a run lives here, or some files could not be checked:
#          this process lacks memory, threads, descriptors or a permission, and the message says
#          which. It makes no statement about those files
#     3    durable data is broken or damaged; the complete steps are listed
#
# The disk space of runs is divided by use; the sum is the sizes that stat reports
# (checkpoint/survey.py):
#
#     durable    named by a durable step; a step's own bytes are those that no other step names
#     live       written in addition by a run that continues
#     free       not needed, or reserved and not written yet; unclear: free, unless an unreadable step needs it
#     records    manifests, parts, the lock file, foreign files
#
# --verify reads every byte of every step and compares it with its checksum. --remove removes the
# folders of killed runs, after naming them, and in them only files that runs make; one that holds a
# part of a durable step, be it broken or on another path, goes only when its own folder is named.
# --repair ends what was cut short before it looks: pointers of removed steps go, what killed saves
# left goes, and a `latest` that is lost, damaged, stale or names no tag names the newest whole one.
# It says what it does, and refuses while a run lives here.

EXIT_DEAD = 1
EXIT_UNREAD = 2
EXIT_DAMAGED = 3
_SPACE = {
    ">on the disk": "file_bytes",
    ">durable": "durable_bytes",
    ">live": "live_bytes",
    ">free": "free_bytes",
    ">unclear": "unclear_bytes",
    ">records": "record_bytes",
}
"""Columns of the space of runs and paths: the field of a report that each shows."""
_STYLES = {"whole": "green", "live": "cyan", "kept": "green", "dead": "yellow", "unseen": "yellow"}
_STYLES |= {"removed": "yellow", "unread": "yellow"}


def fsck(options: FsckOptions, console: Console) -> int:
    """Prints what there is and returns the exit status. Blocks. Raises OSError when the folder
    cannot be looked at; KeyboardInterrupt that says what may be done by then."""
    try:
        return _fsck(options, console)
    except KeyboardInterrupt:
        if not (options.repairs or options.removes):
            raise
        what = "what it was told to change may be changed in part. Run it again"
        raise KeyboardInterrupt(f"stopped; {what}") from None


def _fsck(options: FsckOptions, console: Console) -> int:
    repaired = repair(survey(options.where)) if options.repairs else []
    with transfer_bar(console, "verifying checksums", None, options.verifies) as advance:
        found = survey(options.where, options.verifies, advance)
    going = removable(found) if options.removes else []
    removed = [str(run.folder) for run in going if _remove(run, console)]
    options.save_json({**dataclasses.asdict(found), "removed": removed, "repaired": repaired})
    for each in repaired:
        console.print(f"repaired {each}", style="yellow")
    _print_survey(found, console)
    _advise(found, console, going)
    if options.removes and not found.dead:
        console.print(f"{found.where}: no killed run lies here, and nothing is removed")
    if found.is_damaged:
        return EXIT_DAMAGED
    if found.is_unread:
        return EXIT_UNREAD
    is_left = len(found.dead) > len(removed) or any(step.state == "removed" for step in found.steps)
    return EXIT_DEAD if is_left else 0


def removable(found: Survey) -> list[RunReport]:
    """Killed runs whose folders may go: those without a part of a durable step, be it broken or on
    another path, or the very folder that was named."""
    return [
        run
        for run in found.dead
        if run.folder == found.where or not (found.steps_of(run.run_id) or has_saved(run.folder))
    ]


def _remove(run: RunReport, console: Console) -> bool:
    """Removes what a killed run left; whether the folder is gone."""
    console.print(f"removing {run.folder}, left by {run.owner}", style="yellow")
    try:
        RunFolder.claim(run.folder).close(keep=False)
    except OSError as error:  # another user's, or its lock is no file
        console.print(f"{run.folder} is left: {error.strerror}", style="yellow")
        return False
    if run.folder.exists():
        names = printable(", ".join(each.name for each in run.folder.iterdir()))
        console.print(
            f"{run.folder} stays: {names} in it was made by no run; remove it yourself",
            style="yellow",
        )
    return not run.folder.exists()


def _print_survey(found: Survey, console: Console) -> None:
    if found.runs:
        shown = table(f"{found.where}: runs", "folder", "state", "process", *_SPACE, "not ours")
        for run in found.runs:
            shown.add_row(
                _name(run.folder, found.where),
                _state(run.state),
                run.owner,
                *_sizes(run),
                ", ".join(run.unknown),
            )
        console.print(shown)
    if len(found.runs) > 1:
        shown = table(f"{found.where}: paths", "path", *_SPACE)
        for path in found.paths:
            shown.add_row(str(path.path), *_sizes(path))
        console.print(shown)
    if found.steps:
        shown = table(
            f"{found.where}: durable steps",
            "where",
            "tag",
            ">step",
            ">ranks",
            ">tensors",
            ">states",
            ">durable",
            ">own",
            "state",
            "",
        )
        for step in found.steps:
            shown.add_row(*_cells(step, found.where))
        console.print(shown)
    if not found.runs and not found.steps:
        console.print(f"{found.where}: no run and no durable step")
    for fault in found.faults:
        console.print(fault, style="red")
    for each in found.unread:
        console.print(f"{each}: not looked at", style="yellow")


def _cells(step: StepReport, where: Path) -> Iterable[str | Text]:
    numbers = (step.step, step.world, step.num_parameters)
    sizes = ["" if step.num_bytes is None else format_bytes(step.num_bytes), "", ""]
    if step.places:
        sizes[1:] = format_bytes(step.durable_bytes), format_bytes(step.own_bytes)
    state = f"{step.state}, verified" if step.is_verified else step.state
    tag = f"{step.tag} (latest)" if step.is_latest else step.tag or ""
    shown = ("" if number is None else str(number) for number in numbers)
    return (_name(step.place, where), tag, *shown, *sizes, _state(state), step.why)


def _advise(found: Survey, console: Console, told: Sequence[RunReport]) -> None:
    """Says what to do about the killed runs that `--remove` has said nothing of."""
    for run in found.dead:
        if run in told:
            continue
        steps = found.steps_of(run.run_id)
        removal = f"tiermem fsck {shlex.quote(str(run.folder))} --remove"
        if run in removable(found):
            what = "no durable step: nothing can be resumed. --remove removes it"
        elif steps:
            newest = max(step.step or 0 for step in steps)
            what = f"step {newest} is durable: resume it, or remove it with {removal}"
        else:
            what = (
                "it holds a part of durable steps that are not whole, or lie on another path of "
                f"the run: mount its disks, or lose them with {removal}"
            )
        console.print(
            f"{run.folder}: {run.owner or 'a process'} was killed; {what}", style="yellow"
        )


def _sizes(report: RunReport | PathReport) -> Iterable[str]:
    """The cells below _SPACE."""
    return (format_bytes(getattr(report, field)) for field in _SPACE.values())


def _state(state: str) -> Text:
    return Text(state, style=_STYLES.get(state.split(",")[0], "red"))


def _name(path: Path, where: Path) -> str:
    """A path as short as it is clear."""
    return (
        str(path.relative_to(where)) if path != where and path.is_relative_to(where) else str(path)
    )


# ---- tiermem inspect DIR -------------------------------------------------------------------------
#
# It prints one line for each parameter, buffer and tensor of the optimizer, and the totals of each
# state. --match takes glob patterns of names. It validates manifest and parts, and does not read
# states.


_OF_PARAMETER = ("name", "aliases", "role", "shape", "dtype", "is_trainable", "num_steps")

Figures = Mapping[str, Any]
"""One tensor of the model or the optimizer, as the manifest has it, with its states, their kinds,
bytes and files."""


@no_collection()
def inspect_checkpoint(options: InspectOptions, console: Console) -> int:
    """Prints the step and returns 0. Blocks; raises ValueError and OSError for what cannot be
    opened or matches nothing."""
    with Source.open(options.where, options.tag) as source:
        manifest = source.manifest
        place = str(source.place)
        named: Sequence[Parameter] = manifest.parameters
        if options.patterns:
            named = [
                p
                for p in named
                if any(fnmatch.fnmatchcase(p.name, each) for each in options.patterns)
            ]
            if not named:
                raise ValueError(
                    f"--match: no tensor of {place} is named {' or '.join(options.patterns)}"
                )
        rows = [_figures(source, each) for each in named]
    names = "step", "tag", "run_id", "commit", "world", "num_shards"
    options.save_json(
        {
            **{name: getattr(manifest, name) for name in names},
            "place": place,
            "excluded": manifest.excluded,
            "tensors": rows,
            "totals": totals(rows),
        }
    )
    _print_tensors(rows, manifest, place, console)
    return 0


def totals(rows: Sequence[Figures]) -> dict[str, int]:
    """Bytes of each state over all rows."""
    found = Counter[str]()
    for row in rows:
        found.update(row["state_bytes"])
    return dict(found)


def _figures(source: Source, each: Parameter) -> Figures:
    """As --json has it."""
    states = source.states(each.name)
    sizes = {state: source.bytes_of(each.name, state) for state in states}
    return {
        **{name: getattr(each, name) for name in _OF_PARAMETER},
        "states": {state: source.kind(each.name, state) or "" for state in states},
        "state_bytes": sizes,
        "files": tuple(
            map(
                str,
                dict.fromkeys(
                    [file for state in states for file in source.files(each.name, state)]
                ),
            )
        ),
        "num_bytes": sum(sizes.values()),
    }


def _print_tensors(
    rows: Sequence[Figures], manifest: Manifest, place: str, console: Console
) -> None:
    tag = f", tag {manifest.tag}" if manifest.tag else ""
    ranks = numbered(manifest.world, "rank")
    console.print(f"{place}: step {manifest.step}{tag}, saved by {ranks}, run {manifest.run_id}")
    roots = {
        file: f"[{number}]"
        for number, file in enumerate(dict.fromkeys(f for row in rows for f in row["files"]))
    }
    # The mode: p parameter, b buffer, o ordinary; t trainable; s stepped.
    lines = [("", "shape", "dtype", "states", "bytes", "steps", "file", "name")]
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        states = " ".join(f"{state}:{kind}" for state, kind in row["states"].items())
        name = " = ".join(filter(None, (row["name"], ", ".join(row["aliases"]))))
        mode = (
            row["role"][0]
            + ("t" if row["is_trainable"] else "-")
            + ("s" if row["num_steps"] else "-")
        )
        files = " ".join(roots[f] for f in row["files"])
        num_steps = str(row["num_steps"])
        lines.append(
            (mode, shape, row["dtype"], states, f"{row['num_bytes']:,}", num_steps, files, name)
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [
        f"{{:{'>' if place in (4, 5) else ''}{width}}}" for place, width in enumerate(widths[:-1])
    ]
    form = "  ".join([*cells, "{}"])
    text = "".join(printable(form.format(*line)).replace("\n", "\\n") + "\n" for line in lines)
    # a Text is split and wrapped line by line: seconds
    console.print(Segments([Segment(text)]), crop=False, end="")
    for file, mark in roots.items():
        console.print(f"{mark} {file}", style="dim")
    found = totals(rows)
    parts = ", ".join(f"{state} {format_bytes(num_bytes)}" for state, num_bytes in found.items())
    console.print(
        f"{numbered(len(rows), 'tensor')}, {format_bytes(sum(found.values()))}: {parts or 'nothing'}"
    )
    if manifest.excluded:
        console.print(
            f"left out when it was saved, frozen: {', '.join(manifest.excluded)}", style="dim"
        )


# ---- tiermem import SOURCE OUT -------------------------------------------------------------------
#
# It reads DeepSpeed ZeRO-3 folders, torch.distributed.checkpoint folders, torch state dicts and
# safetensors, and executes no code in them. It reports the states that it wrote and those that it
# could not take. `tiermem train --resume` can continue from the result if the model's config.json
# is given or lies beside the weights.

CONFIG_NAME = "config.json"


def import_checkpoint(options: ImportOptions, console: Console) -> int:
    """Writes OUT/<tag>/ and OUT/latest, and returns 0. Blocks; raises ValueError and OSError, and
    then nothing is left; KeyboardInterrupt, which says what is there."""
    with _writing(options.out):
        return _import(options, console)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """A block that writes all into a folder or nothing. An interrupt says which."""
    before = _names_in(out)
    try:
        yield
    except KeyboardInterrupt:
        if _names_in(out) == before:
            raise
        raise KeyboardInterrupt(f"stopped; {out} had been written") from None


def _names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _import(options: ImportOptions, console: Console) -> int:
    foreign = read_foreign(options.source, options.tag, options.optimizer)
    shape = _model_config(options)
    if shape is not None:
        run = {
            CLIENT_KEY: options_to_save(TrainOptions(), options.source.resolve().name, shape, None)
        }
        foreign = dataclasses.replace(foreign, client_state={**foreign.client_state, **run})
    with transfer_bar(console, "writing", total_bytes(foreign)) as advance:
        done = write_checkpoint(foreign, options.out, options.new_tag, advance)
    options.save_json({"kind": foreign.kind, **done._asdict()})
    has_moments = any(len(p.states) > 1 for p in foreign.parameters)
    what = "weights and optimizer states" if has_moments else "weights"
    sizes = f"{numbered(done.num_parameters, 'tensor')}, {format_bytes(done.num_bytes)}, step {done.step}"
    console.print(f"{foreign.kind}: {what} of {sizes}  ->  {done.folder}")
    for each in done.left_behind:
        console.print(f"left behind: {each}", style="yellow")
    resumed = f", or tiermem train --resume {shlex.quote(str(options.out))}" if shape else ""
    console.print(f'load it with engine.load_checkpoint("{options.out}"){resumed}', style="dim")
    return 0


def total_bytes(foreign: Foreign) -> int:
    """Of all states."""
    return sum(
        math.prod(p.shape) * state.dtype.itemsize
        for p in foreign.parameters
        for state in p.states.values()
    )


@contextlib.contextmanager
def transfer_bar(
    console: Console, what: str, num_bytes: int | None, is_shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """A bar over so many bytes on a terminal, nothing elsewhere; gives the function that is told of
    bytes done.

    num_bytes: None where the total is not known.
    """
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not (is_shown and console.is_terminal),
    ) as bar:
        yield functools.partial(bar.advance, bar.add_task(what, total=num_bytes))


def _model_config(options: ImportOptions) -> dict[str, Any] | None:
    """The model's config.json: the file or folder given, or what lies beside the weights. Raises
    ValueError, OSError."""
    given = options.model if options.model is not None else options.source
    file = given / CONFIG_NAME if given.is_dir() else given
    if options.model is None and (file.name != CONFIG_NAME or not file.is_file()):
        return None
    found = read_json(file)
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ValueError(f"--model: {file} is no model's config.json: model_type is missing")
    return found


# ---- tiermem export DIR OUT ----------------------------------------------------------------------
#
#     (default)    Hugging Face safetensors shards with an index, and config.json where it is known
#     --pytorch    pytorch_model.bin
#     --dcp        a torch.distributed.checkpoint folder, optimizer states included
#     --whole      a tiermem checkpoint: every byte of the step, also of one whose bytes rest on the run's paths
#
# It streams: memory does not grow with the model. It verifies all bytes that it reads. A damaged
# state ends the export, and no output is left.


def export_checkpoint(options: ExportOptions, console: Console) -> int:
    """Writes OUT and returns 0. Blocks; raises ValueError and OSError, and then nothing of ours is
    left there; KeyboardInterrupt, which says what is there."""
    with _writing(options.out):
        return (_export_whole if options.is_whole else _export)(options, console)


def _export(options: ExportOptions, console: Console) -> int:
    given = "fp32" if options.is_fp32 else options.dtype
    dtype = None if given is None else dtype_of(given)
    with Source.open(options.where, options.tag) as source:
        if options.is_dcp:
            from tiermem.checkpoint.interchange.export import export_dcp  # takes a second

            with transfer_bar(console, "writing", source.num_bytes) as advance:
                num_bytes = export_dcp(source, options.out, dtype, advance)
            files = sorted(file.name for file in options.out.iterdir())
        else:
            files, num_bytes = _export_weights(options, source, dtype, console)
        step = source.manifest.step
        excluded = source.manifest.excluded
    options.save_json({"step": step, "files": files, "num_bytes": num_bytes, "folder": options.out})
    console.print(
        f"step {step}: {format_bytes(num_bytes)} in {numbered(len(files), 'file')}  ->  {options.out}"
    )
    if excluded:
        console.print(
            f"not in the checkpoint, frozen when it was saved: {', '.join(excluded)}",
            style="yellow",
        )
    return 0


def _export_whole(options: ExportOptions, console: Console) -> int:
    from tiermem.checkpoint.interchange.whole import export_whole

    with transfer_bar(console, "comparing checksums", None) as advance:
        done = export_whole(options.where, options.out, options.tag, advance)
    options.save_json(done._asdict())
    console.print(
        f"step {done.step}: {format_bytes(done.num_bytes)}, all that a run needs  ->  {done.folder}"
    )
    return 0


def _export_weights(
    options: ExportOptions, source: Source, dtype: Any, console: Console
) -> tuple[list[str], int]:
    # takes a second: torch's checkpoints
    from tiermem.checkpoint.interchange.export import export_weights
    from tiermem.checkpoint.opening.source import weights_of

    weights = weights_of(source, dtype, options.exclude_frozen)
    total = sum(weight.parameter.numel * weight.dtype.itemsize for weight in weights)
    config = _config_text(options.model, source)
    with transfer_bar(console, "writing", total) as advance:
        shards = export_weights(
            weights, options.out, options.max_shard_bytes, not options.is_pytorch, config, advance
        )
    return [shard.name for shard in shards], total


def _config_text(given: Path | None, source: Source) -> str | None:
    """The model's config.json: the file given, or what the run that saved said of its model."""
    if given is not None:
        file = given / CONFIG_NAME if given.is_dir() else given
        if not file.is_file():
            raise FileNotFoundError(2, "--model: there is no such file", str(file))
        return file.read_text("utf-8")
    said = source.manifest.client_state
    run = said.get(CLIENT_KEY) if isinstance(said, Mapping) else None
    shape = run.get("shape") if isinstance(run, Mapping) else None
    return (
        json.dumps(shape, indent=2) + "\n"
        if isinstance(shape, dict) and "model_type" in shape
        else None
    )
