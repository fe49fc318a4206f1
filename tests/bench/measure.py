"""Measure: appends rows to docs/measured/*.json and writes docs/measured.md from them.

    python -m bench.measure --path DIR                 every question that has a command; takes an hour
    python -m bench.measure --path DIR --only io,step  some
    python -m bench.measure --only page                the page alone

    command of a question -> its JSON -> rows (commit, machine, case, ours, bound, ratio, spread) -> page

A file of docs/measured holds one question: its title, one sentence, the command that answers it, a
note, and rows, the oldest first. Rows whose figures a command does not write (a GPU's, of other systems) were
entered by hand from the output of the command that the file names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import python_path
from bench.parity import commit_of
from tiermem.tools.measure.machine import machine_facts

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "measured"
PAGE = ROOT / "docs" / "measured.md"
COLUMNS = ("case", "commit", "machine", "ours", "bound", "ratio", "spread")
ORDER = (
    "iteration",
    "step",
    "io",
    "adam",
    "ranks",
    "deepspeed",
    "h200",
    "predictions",
    "checkpoints",
    "precisions",
    "start",
)
"""Files of docs/measured, as the page has them."""
HEAD = """<!-- Written by `make measure`. Do not edit it. -->

# Measured

One section a question. *Ours* stands beside a *bound*: the fastest that the same machine allows, or
another system, in turns in one run. *Ratio* is ours by the bound (of times: less is better; of
rates: more), *spread* the least and the most. A date stands where the commit was not written down.
The machines with 2 cores are virtual (24 GB of memory, a virtual disk), shared with others.
"""
Row = dict[str, Any]


class Question(NamedTuple):
    """How a question is asked again."""

    words: Sequence[str]
    rows: Callable[[dict[str, Any]], Iterator[Row]]
    has_path: bool = True


def io_rows(report: dict[str, Any]) -> Iterator[Row]:
    """The best row of each mode beside the bare loop."""
    for mode, row in report["best"].items():
        if row.get("fraction"):
            yield {
                "case": f"{mode}, blocks of {row['block_bytes'] >> 10} KiB, {row['depth']} in flight",
                "ours": f"{row['gbps_median']:.2f} GB/s",
                "bound": f"{row['yardstick_gbps']:.2f} GB/s",
                "ratio": f"{row['fraction']:.3f}",
                "spread": f"{row['gbps_min']:.2f} to {row['gbps_max']:.2f} GB/s",
            }


def step_rows(report: dict[str, Any]) -> Iterator[Row]:
    for row in report["rows"]:
        yield {
            "case": f"{row['preset']}, {row['num_params'] / 1e6:.0f} M parameters",
            "ours": f"{row['step_s_median']:.3f} s",
            "bound": f"{row['roofline_s']:.3f} s",
            "ratio": f"{row['roofline_fraction']:.3f}",
            "spread": f"{min(row['step_s']):.3f} to {max(row['step_s']):.3f} s",
        }


def adam_rows(report: dict[str, Any]) -> Iterator[Row]:
    for row in report["rows"]:
        if row["stream_fraction"] is not None:
            loops = row["ns_per_param_loops"]
            yield {
                "case": row["name"],
                "ours": f"{row['gbps']:.1f} GB/s",
                "bound": f"stream {row['stream_gbps']:.1f} GB/s",
                "ratio": f"{row['stream_fraction']:.3f}",
                "spread": f"{min(loops):.3f} to {max(loops):.3f} ns",
            }


def ranks_rows(report: dict[str, Any]) -> Iterator[Row]:
    ours, theirs = (report["step_s"][who]["whole"] for who in ("tiermem", "fsdp2"))
    loops = [loop["whole"] for loop in report["loops"]["steps"]["tiermem"]]
    yield {
        "case": "2 ranks, everything in memory, beside FSDP2",
        "ours": f"{ours * 1e3:.0f} ms",
        "bound": f"{theirs * 1e3:.0f} ms",
        "ratio": f"{report['ratio']:.3f}",
        "spread": f"{min(loops) * 1e3:.0f} to {max(loops) * 1e3:.0f} ms",
    }


def iteration_rows(report: dict[str, Any]) -> Iterator[Row]:
    row = report["rows"][1]
    yield {
        "case": f"{report['states']}, {report['seq']} tokens",
        "ours": f"{row['iteration_s_median']:.2f} s",
        "bound": f"{report['yardstick_s']:.2f} s",
        "ratio": f"{row['iteration_s_median'] / report['yardstick_s']:.3f}",
        "spread": f"{min(row['iteration_s']):.2f} to {max(row['iteration_s']):.2f} s",
    }


LOOP = "build/yardsticks/bare_loop"
QUESTIONS = {
    "iteration": Question(
        ("bench", "overlap", "--overlap", "backward", "--seq", "128", "--yardstick", LOOP),
        iteration_rows,
    ),
    "step": Question(
        ("tiermem", "bench", "step", "--preset", "exact,compact,tiny", "--params", "256M"),
        step_rows,
    ),
    "io": Question(
        (
            *("tiermem", "bench", "io", "--mode", "read,write,mixed,random"),
            *("--block", "1MiB,4MiB", "--depth", "16,64", "--yardstick", LOOP),
        ),
        io_rows,
    ),
    "adam": Question(
        ("tiermem", "bench", "adam", "--yardstick", "build/yardsticks/bare_stream"),
        adam_rows,
        has_path=False,
    ),
    "ranks": Question(("bench", "ranks"), ranks_rows, has_path=False),
}


def ask(name: str, path: Path | None) -> list[Row]:
    """Runs a question's command; returns its rows, with commit and machine. Blocks for minutes."""
    question = QUESTIONS[name]
    module = {"tiermem": "tiermem.tools.cli", "bench": "bench"}[question.words[0]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        command = [sys.executable, "-m", module, *question.words[1:], "--json", str(file)]
        command += ["--path", str(path)] if question.has_path else []
        subprocess.run(  # `overlap` exits with 1 where a bound does not hold: a figure all the same
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path()},
            check=question.words[1] != "overlap",
        )
        report = json.loads(file.read_text("utf-8"))
    facts = machine_facts()
    where = {
        "commit": commit_of(ROOT),
        "machine": f"{facts['cpu']}, {facts['num_cores']} cores",
    }
    return [{**where, **row} for row in question.rows(report)]


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


def append(name: str, rows: Sequence[Row]) -> None:
    """Adds rows to a question's file."""
    found = load(name)
    found["rows"] += rows
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in found["rows"])
    head = json.dumps({key: found[key] for key in found if key != "rows"}, ensure_ascii=False)
    text = f'{head[:-1]}, "rows": [\n{lines}\n]}}\n'
    (FOLDER / f"{name}.json").write_text(text, "utf-8")


def page() -> str:
    """docs/measured.md."""
    parts = [HEAD]
    commands: list[str] = []
    for name in ORDER:
        found = load(name)
        rows = found["rows"]
        shown = [each for each in COLUMNS if any(row.get(each) for row in rows)]
        parts.append(f"## {found['title']}\n\n{found['sentence']}\n")
        parts.append(f"| {' | '.join(shown)} |\n{'|---' * len(shown)}|")
        parts += [f"| {' | '.join(str(row.get(each, '')) for each in shown)} |" for row in rows]
        parts.append(f"\n{found['note']}\n" if found["note"] else "")
        commands += [found["command"]] if found["command"] else []
    parts.append("## Commands\n\n<!-- not run: an hour, and other systems -->\n```sh")
    return "\n".join([*parts, *commands, "```\n"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=Path())
    parser.add_argument("--only", help="page, or some of " + ", ".join(QUESTIONS))
    given = parser.parse_args(arguments)
    names = given.only.split(",") if given.only else list(QUESTIONS)
    unknown = [name for name in names if name not in (*QUESTIONS, "page")]
    if unknown:
        parser.error(f"--only is {unknown[0]}; allowed are page, {', '.join(QUESTIONS)}")
    for name in names:
        if name != "page":
            append(name, ask(name, given.path.absolute()))
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
