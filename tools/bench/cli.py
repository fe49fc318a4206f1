"""The command line of `tiermem bench`: io, adam, step, ranks, curves and gpu. See cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiermem.tools.machine import parse_tbw
from tiermem.tools.words import parse_bytes, parse_count, refusing

bench = typer.Typer(help="Measure what this machine reaches.", no_args_is_help=True)


@bench.command("io")
def bench_io(
    path: Annotated[list[Path], typer.Option(help="folders on the disks: each alone, then all at once")],
    size: Annotated[str, typer.Option(help="of the file in each folder, for each rank")] = "2GiB",
    block: Annotated[str, typer.Option(help="block sizes")] = "256KiB,1MiB,4MiB",
    depth: Annotated[str, typer.Option(help="blocks in flight")] = "1,8,32",
    engine: Annotated[str, typer.Option(help="some of auto,uring,aio,threads")] = "auto",
    mode: Annotated[
        str, typer.Option(help="some of read,write,mixed,random,tensors,sustained")
    ] = "read,write,mixed,random",
    ranks: Annotated[str, typer.Option(help="processes at once, such as 1,4")] = "1",
    loops: Annotated[int, typer.Option(help="passes of each setting, turn and turn about")] = 5,
    random_block: Annotated[str, typer.Option(help="block size of random")] = "4KiB",
    fsync: Annotated[bool, typer.Option("--fsync", help="end each writing pass with a sync")] = False,
    threads: Annotated[int, typer.Option(help="of the threads engine [default: it chooses]", show_default=False)] = 0,
    most_bytes: Annotated[str, typer.Option("--bytes", help="that sustained writes")] = "64GiB",
    seconds: Annotated[float | None, typer.Option(help="after which sustained stops")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write machine, rows and best here")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="write the rows here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw heat maps, as a PNG")] = None,
    fio: Annotated[bool, typer.Option("--fio", help="fio on the same file, when it is installed")] = False,
    yardstick: Annotated[Path | None, typer.Option(help="build/yardsticks/bare_loop, from `make yardsticks`")] = None,
    peer_python: Annotated[Path | None, typer.Option(help="an interpreter that has DeepSpeed: its aio_handle")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Measure a folder's disk: GB/s, latencies and CPU time of every engine, block size, depth and pattern."""
    from tiermem.tools.bench.io import IoBenchOptions, parse_list
    from tiermem.tools.bench.io import bench_io as run_benchmark
    from tiermem.tools.reports import open_console

    with refusing("bench io", debug, "stopped; nothing is left on the paths"):
        options = IoBenchOptions(
            paths=path,
            size_bytes=parse_bytes(size),
            blocks=parse_list(block, "--block", parse_bytes),
            depths=parse_list(depth, "--depth", int),
            engines=parse_list(engine, "--engine"),
            modes=parse_list(mode, "--mode"),
            ranks=parse_list(ranks, "--ranks", int),
            loops=loops,
            random_block_bytes=parse_bytes(random_block),
            sync=fsync,
            threads=threads,
            sustained_bytes=parse_bytes(most_bytes),
            sustained_s=seconds,
            json_file=json_file,
            csv_file=csv_file,
            plot_file=plot_file,
            has_fio=fio,
            yardstick=yardstick,
            peer_python=peer_python,
        )
        status = run_benchmark(options, open_console())
    raise typer.Exit(status)


@bench.command("adam")
def bench_adam(
    params: Annotated[str, typer.Option(help="parameters to step, such as 128M")] = "128M",
    loops: Annotated[int, typer.Option(help="of each row, everybody in turn")] = 9,
    threads: Annotated[int | None, typer.Option(help="of everybody's maths [default: the cores]")] = None,
    row: Annotated[list[str] | None, typer.Option(help="part of the names of rows to measure [default: all]")] = None,
    yardstick: Annotated[Path | None, typer.Option(help="build/yardsticks/bare_stream, from `make yardsticks`")] = None,
    peer_python: Annotated[Path | None, typer.Option(help="an interpreter that has DeepSpeed: its CPU Adam")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write machine and rows here")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Time AdamW in every precision, beside the memory's own speed, torch's fused AdamW and DeepSpeedCPUAdam."""
    from tiermem.tools.bench.adam import AdamBenchOptions
    from tiermem.tools.bench.adam import bench_adam as run_benchmark
    from tiermem.tools.reports import open_console

    with refusing("bench adam", debug, "stopped; nothing was written"):
        options = AdamBenchOptions(
            num_params=parse_count(params),
            loops=loops,
            threads=threads,
            rows=tuple(row or ()),
            json_file=json_file,
            yardstick=yardstick,
            peer_python=peer_python,
        )
        status = run_benchmark(options, open_console())
    raise typer.Exit(status)


@bench.command("step")
def bench_step(
    path: Annotated[list[Path], typer.Option(help="folders on the NVMe disks: the states are dealt over them")],
    params: Annotated[str, typer.Option(help="parameters to step, such as 256M")] = "256M",
    precision: Annotated[str, typer.Option(help="of parameters and gradients: fp32 or bf16")] = "bf16",
    preset: Annotated[
        str, typer.Option(help="of states: exact, compact, bf16, tiny; several with commas are compared")
    ] = "exact",
    loops: Annotated[int, typer.Option(help="steps to time")] = 5,
    resident: Annotated[str, typer.Option(help="states kept in memory; several such as 0,25%,1GiB are compared")] = "0",
    only_states: Annotated[bool, typer.Option("--only-states", help="keep parameters and gradients in memory")] = False,
    verify: Annotated[
        str, typer.Option(help="checksums: always, sample, resume (none); several with commas are compared")
    ] = "always",
    compare: Annotated[bool, typer.Option("--compare", help="also with either half of the pipeline off")] = False,
    no_pipeline: Annotated[bool, typer.Option("--no-pipeline", help="read, compute and write in turn")] = False,
    yardstick: Annotated[Path | None, typer.Option(help="build/yardsticks/bare_loop, from `make yardsticks`")] = None,
    engine: Annotated[str, typer.Option(help="auto, uring, aio or threads")] = "auto",
    tbw: Annotated[str | None, typer.Option(help="what the drive may be written in its life, such as 600TB")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw a step tile by tile, as a PNG")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Time optimizer steps over states on NVMe, beside the disk's roofline for the same bytes."""
    from tiermem.tools.bench.step import StepBenchOptions
    from tiermem.tools.bench.step import bench_step as run_benchmark
    from tiermem.tools.reports import open_console

    with refusing("bench step", debug, "stopped; nothing is left on the paths"):
        options = StepBenchOptions(
            paths=path,
            num_params=parse_count(params),
            precision=precision,
            preset=preset,
            loops=loops,
            resident=resident,
            verify=verify,
            compares=compare,
            pipelines=not no_pipeline,
            only_states=only_states,
            yardstick=yardstick,
            engine=engine,
            tbw_bytes=parse_tbw(tbw) if tbw is not None else None,
            json_file=json_file,
            plot_file=plot_file,
        )
        status = run_benchmark(options, open_console())
    raise typer.Exit(status)


@bench.command("ranks")
def bench_ranks(
    ranks: Annotated[int, typer.Option(help="processes, gloo between them")] = 2,
    loops: Annotated[int, typer.Option(help="steps of each, in turn")] = 15,
    blocks: Annotated[int, typer.Option(help="of the model")] = 8,
    width: Annotated[int, typer.Option(help="of a block; it holds 8 x width^2 parameters")] = 512,
    samples: Annotated[int, typer.Option(help="rows of each rank's batch")] = 512,
    empty: Annotated[int, typer.Option(help="units that compute next to nothing, for the overhead")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="write machine and figures here")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Time a step on several ranks with everything in memory beside FSDP2's, and the Python around a unit."""
    from tiermem.tools.bench.ranks import RanksBenchOptions
    from tiermem.tools.bench.ranks import bench_ranks as run_benchmark
    from tiermem.tools.reports import open_console

    with refusing("bench ranks", debug, "stopped; nothing was written"):
        options = RanksBenchOptions(ranks, loops, blocks, width, samples, empty, json_file)
        status = run_benchmark(options, open_console())
    raise typer.Exit(status)


@bench.command("curves")
def bench_curves(
    steps: Annotated[int, typer.Option(help="optimizer steps under each preset")] = 300,
    presets: Annotated[str, typer.Option(help="of states, to be compared with the first")] = "exact,compact,tiny,bf16",
    data: Annotated[
        list[Path] | None, typer.Option(help="text files or folders [default: Python's own sources and documentation]")
    ] = None,
    seed: Annotated[int, typer.Option(help="of weights, data and rounding: the first")] = 0,
    repeats: Annotated[int, typer.Option(help="seeds whose means are compared")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the losses here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw the losses, as a PNG")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Train a small model with its states in several precisions and compare the losses."""
    from tiermem.tools.bench.curves import CurvesOptions
    from tiermem.tools.bench.curves import bench_curves as run_benchmark
    from tiermem.tools.reports import open_console

    with refusing("bench curves", debug, "stopped by Ctrl-C; nothing was written"):
        options = CurvesOptions(steps, presets.split(","), tuple(data or ()), seed, repeats, json_file, plot_file)
        status = run_benchmark(options, open_console())
    raise typer.Exit(status)


@bench.command(
    "gpu",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench_gpu(context: typer.Context) -> None:
    """Try this machine's accelerator: registration, copies, tests, a small training. Its options: `bench gpu --help`."""
    from tiermem.tools.bench.gpu import main as run_benchmark

    raise typer.Exit(run_benchmark(context.args))
