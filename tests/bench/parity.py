"""The parity report, `make report`: what was tried on this machine and commit, and what was seen,
as docs/parity.md.

    bits      a small model trained in every way (tier x engine x tile) in each precision, on one rank and on several: one
              digest of all losses, weights and states a training. Trainings whose digests are equal
              are equal to the bit
    harms     tests/crash, in a checkout: runs that are killed, whose disk forgets, whose nth system call or allocation fails

    python -m bench.parity --out docs/parity.md --ranks 1,2 --cases 100

Nothing in the report is written by hand. Exit status 0: no training and no case differed; 1: some
did, and the report says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

import tiermem
from bench.small_training import Block, Tower
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.ranks.joining import hold_no_group
from tiermem.swap.base.native import IoSettings
from tiermem.tools.measure.machine import caption, machine_facts, try_engines
from tiermem.tools.words import EXIT_USER, message_of
from tiermem.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

EXIT_DIFFERS = 1

# ---- bits ----------------------------------------------------------------------------------------

STEPS = 4
WIDTH = 64
NUM_BLOCKS = 4
PRECISIONS = {"fp32": (torch.float32, "exact")} | {
    f"bf16, {states}": (torch.bfloat16, states) for states in ("exact", "compact", "bf16", "tiny")
}
"""The dtype of the weights, and the preset of masters and moments."""


class Way(NamedTuple):
    """Where states rest and how they move; the first one is what the others are compared with."""

    name: str
    fields: Mapping[str, Any]
    engine: str = "auto"


def ways() -> list[Way]:
    """Every way that can be tried here."""
    nvme = {"params": Tier.NVME, "optim": Tier.NVME}
    found = [
        Way("all in host memory", {"params": Tier.HOST, "optim": Tier.HOST}),
        Way(
            "weights on the device (the CPU's memory), states in host memory", {"optim": Tier.HOST}
        ),
        Way("states on NVMe", {"params": Tier.HOST, "optim": Tier.NVME}),
        Way("weights on NVMe", {"params": Tier.NVME, "optim": Tier.HOST}),
        Way("all on NVMe, gradients too", {**nvme, "grads": Tier.NVME}),
        Way("all on NVMe, tiles of 4,096 elements", {**nvme, "tile_numel": 4096}),
        Way(
            "all on NVMe, half of the states resident",
            {**nvme, "tile_numel": 4096, "resident_bytes": 500_000},
        ),
        Way(
            "all on NVMe, no reading ahead, no writing behind",
            {**nvme, "pipeline_read": False, "pipeline_write": False},
        ),
        Way("all on NVMe, each step durable", {**nvme, "durability": "step"}),
    ]
    engines = [name for name, (runs, _) in try_engines().items() if runs and name != "auto"]
    return found + [Way(f"all on NVMe, engine {name}", nvme, name) for name in engines]


def digest_of(way: Way, precision: str, folder: Path) -> str:
    """Trains a tower of blocks; returns a digest of its losses, weights, masters and moments.
    Collective; blocks."""
    dtype, states = PRECISIONS[precision]
    torch.manual_seed(0)
    model = Tower([*(Block(WIDTH) for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 8)]).to(dtype)
    io = IoSettings(way.engine, block_bytes=1 << 16, depth=8)
    policy = OffloadPolicy(
        persistence_numel=100, precision=Precision.preset(states), io=io, paths=[folder]
    )
    policy = dataclasses.replace(policy, **way.fields)
    found = hashlib.sha256()
    with tiermem.shard(model, policy, device="cpu") as shards:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + shards.topology.rank)
            x = torch.randn(16, WIDTH, generator=generator).to(dtype)
            loss = model(x).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.update(loss.detach().numpy().tobytes())
        for p in model.parameters():
            values = [shards.weight(p), safe_get_full_fp32_param(p)]
            values += [safe_get_full_optimizer_state(p, name) for name in ("exp_avg", "exp_avg_sq")]
            for each in values:
                assert each is not None
                found.update(each.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def run_rank(rank: int, num_ranks: int, folder: Path) -> None:
    """Trains in every way and precision on one rank; writes {precision: {way: digest}} into
    <rank>.json."""
    torch.set_num_threads(1)
    hold_no_group()
    store = torch._C._distributed_c10d.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120)
    )
    found = {
        precision: {way.name: digest_of(way, precision, folder) for way in ways()}
        for precision in PRECISIONS
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


Digests = dict[str, dict[str, list[str]]]
"""By precision and way: every rank's."""


def compare_bits(num_ranks: int) -> Digests:
    """Trains on so many ranks, processes of their own. Blocks."""
    with tempfile.TemporaryDirectory(prefix="tiermem-parity-", dir=".") as name:
        folder = Path(name).absolute()
        start_processes(run_rank, (num_ranks, folder), nprocs=num_ranks, start_method="spawn")
        said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return {p: {way: [each[p][way] for each in said] for way in said[0][p]} for p in said[0]}


def differing(digests: Digests) -> list[str]:
    """The trainings that are not those of the first way, to the bit."""
    return [
        f"{precision}: {way}"
        for precision, by_way in digests.items()
        for way, found in by_way.items()
        if found != next(iter(by_way.values()))
    ]


# ---- harms ---------------------------------------------------------------------------------------


class Harm(NamedTuple):
    """A program of tests/crash, and how to ask it for a number of cases."""

    title: str
    script: str
    words: Sequence[str]


def harms(num_cases: int) -> list[Harm]:
    """All programs, each with about so many cases."""
    sample = ("--sample", str(num_cases))
    return [
        Harm(
            "processes killed, and opened again",
            "deaths.py",
            ("--share", str(num_cases / 4000), "--count", str(1 + num_cases // 50)),
        ),
        Harm("the power fails after a write", "write_log.py", sample),
        Harm("a system call or an allocation fails", "nth.py", sample),
    ]


def do_harm(harm: Harm, tests: Path) -> dict[str, Any]:
    """Runs a program; returns what it counted, or why it did not run. Blocks for minutes."""
    with tempfile.TemporaryDirectory(prefix="tiermem-parity-", dir=".") as name:
        totals = Path(name).absolute() / "totals.json"
        command = [
            sys.executable,
            harm.script,
            f"{totals.parent}/runs",
            "--totals",
            str(totals),
            *harm.words,
        ]
        done = subprocess.run(
            command, cwd=tests / "crash", capture_output=True, text=True, check=False
        )
        if not totals.exists():
            return {
                "not_run": " ".join(
                    (done.stderr.strip().splitlines() or ["it said nothing"])[-1].split()
                )
            }
        found: dict[str, Any] = json.loads(totals.read_text())
        return found


def num_cases_of(counted: Mapping[str, Any]) -> int:
    cases = counted["cases"]
    return sum(cases.values()) if isinstance(cases, dict) else int(cases)


# ---- the report ----------------------------------------------------------------------------------


def report(
    facts: dict[str, Any],
    commit: str,
    command: str,
    bits: Mapping[int, Digests],
    harmed: Mapping[Harm, Any],
) -> str:
    """The page, as Markdown."""
    return "\n".join([*_head(facts, commit, command), *_bits(bits), *_harms(harmed), ""])


def _head(facts: dict[str, Any], commit: str, command: str) -> Iterator[str]:
    yield "<!-- Written by `make report`. Do not edit it. -->\n"
    yield "# Parity report\n"
    yield (
        "What was tried on one machine, and what was seen. `make report` runs all of it again "
        "and writes this page.\n"
    )
    yield f"- machine: {caption(facts)}"
    yield f"- commit: {commit}"
    yield f"- torch {torch.__version__}, Python {facts['python']}"
    yield f"- command: {command}\n"
    yield (
        "No accelerator was there."
        if not torch.accelerator.is_available()
        else "Everything ran on the CPU."
    )
    yield "Tests train on a simulated device; `make gpu` writes the report of a GPU.\n"


def _bits(bits: Mapping[int, Digests]) -> Iterator[str]:
    yield "## Bits\n"
    yield (
        f"A tower of {NUM_BLOCKS} blocks (width {WIDTH}), {STEPS} steps of AdamW with clipping, "
        "another batch on each rank."
    )
    yield (
        "Trainings are compared by the SHA-256 of all losses, weights, masters and moments of "
        "each rank.\n"
    )
    for num_ranks, digests in bits.items():
        wrong = differing(digests)
        num_trainings = sum(map(len, digests.values()))
        yield (
            f"### {num_ranks} rank{'s' * (num_ranks > 1)}: {num_trainings - len(wrong)} of "
            f"{num_trainings} trainings equal\n"
        )
        if not wrong:
            yield _sentence(digests)
            continue
        yield f"| way | {' | '.join(digests)} |"
        yield "|---" * (len(digests) + 1) + "|"
        for way in next(iter(digests.values())):
            cells = [
                f"`{digests[precision][way][0]}`{' **differs**' * (f'{precision}: {way}' in wrong)}"
                for precision in digests
            ]
            yield f"| {way} | {' | '.join(cells)} |"
        yield ""


def _sentence(digests: Digests) -> str:
    """Of ways that are all equal."""
    first = {precision: next(iter(by_way.values()))[0] for precision, by_way in digests.items()}
    hashes = ", ".join(f"{precision} `{digest}`" for precision, digest in first.items())
    ways = "; ".join(next(iter(digests.values())))
    return f"In each precision ({hashes}) these ways have the same bits: {ways}.\n"


def _harms(harmed: Mapping[Harm, Any]) -> Iterator[str]:
    yield "## Harms\n"
    yield (
        "Programs of tests/crash. After each case the last durable step, or a later one, must "
        "open to the bit, and"
    )
    yield (
        "`tiermem fsck` must find nothing broken. A run that goes on must have the losses of the "
        "run that nothing happened"
    )
    yield "to. The seed chooses the cases.\n"
    yield "| what happens | cases | failed | seed | seconds |"
    yield "|---|---|---|---|---|"
    for harm, found in harmed.items():
        if "not_run" in found:
            yield f"| {harm.title} (`{harm.script}`) | not run: {found['not_run']} | | | |"
        else:
            cases = f"{num_cases_of(found):,}" + (f" of {found['of']:,}" if "of" in found else "")
            yield (
                f"| {harm.title} (`{harm.script}`) | {cases} | {found['failed']} | "
                f"{found['seed']} | {found['seconds']} |"
            )
    yield ""


def commit_of(folder: Path) -> str:
    """The commit of a checkout, and whether its program or tests differ from it; "not a checkout"
    elsewhere."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=False
        ).stdout.strip()

    if not folder.is_dir():
        return "not a checkout"
    changed = git(
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ":/native",
        ":/swap",
        ":/tiermem",
        ":/tools",
        ":/tests",
    )
    return (git("log", "-1", "--format=%h of %cs") or "not a checkout") + (
        ", with changes" if changed else ""
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything and writes the page; returns the exit status. Blocks for minutes."""
    parser = argparse.ArgumentParser(prog="python -m bench.parity", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the page to write")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, such as 1,2,4")
    parser.add_argument(
        "--cases", type=int, default=100, help="about so many of each harm; 0: none"
    )
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="the tests of a checkout")
    given = parser.parse_args(arguments)
    facts = machine_facts()
    commit = commit_of(given.tests)
    started = time.monotonic()
    try:
        bits = {
            int(num_ranks): compare_bits(int(num_ranks)) for num_ranks in given.ranks.split(",")
        }
    except (ValueError, OSError) as error:
        print(f"parity: {message_of(error)}", file=sys.stderr)
        return EXIT_USER
    harmed = {
        harm: do_harm(harm, given.tests) for harm in (harms(given.cases) if given.cases else ())
    }
    words = " ".join(
        ["python -m bench.parity", *(sys.argv[1:] if arguments is None else arguments)]
    )
    command = f"`{words}`, which took {time.monotonic() - started:.0f} s"
    given.out.write_text(report(facts, commit, command, bits, harmed), "utf-8")
    num_wrong = sum(len(differing(each)) for each in bits.values()) + sum(
        each.get("failed", 0) for each in harmed.values()
    )
    print(f"{given.out}: {num_wrong} differences or failures")
    return EXIT_DIFFERS if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
