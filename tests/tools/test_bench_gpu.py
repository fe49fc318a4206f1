"""Does `bench gpu` run whole on an accelerator, without packages that a bare machine lacks, and
else say so?"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("_tiermem_native")

from bench import gpu, gpu_models, gpu_passes
from bench.gpu_models import ModelRun, layers_that_fit, readme_table
from bench.gpu_passes import Done, run_process, totals_of
from bench.gpu_report import draw_report, faults_of, print_report
from bench.gpu_trace import hidden_share, profiled, read_trace
from bench.small_training import SAME, Sizes, compare, train_in
from on_simulated import environment, python

from tiermem.tools.presets import ModelSizes, llama
from tiermem.tools.words import save_json

TESTS = Path(__file__).parent.parent
WHOLE = f"""
import sys
sys.path.append({str(TESTS)!r})
from bench.gpu import main
sys.exit(main(sys.argv[1:]))
"""
BARE = (
    """
import sys
sys.modules.update(dict.fromkeys(["rich", "typer", "transformers", "matplotlib", "psutil"]))  # an import of them fails
"""
    + WHOLE
)
SMALL = ["--most", "256KiB", "--seconds", "0.001", "--register", "2MiB,900TiB", "--steps", "3"]
SMALL += [
    "--width",
    "64",
    "--blocks",
    "2",
    "--samples",
    "8",
    "--trace-samples",
    "8",
    "--trace-width",
    "64",
]
SMALL += ["--step-numel", "70000"]
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
CHECKER = """#!/bin/sh
while [ "$1" != "$PYTHON" ]; do echo "$1" >> "$ASKED"; shift; done
"$@"
status=$?
echo "========= ERROR SUMMARY: $ERRORS errors"
[ "$ERRORS" = 0 ] && exit $status
exit 86
"""


def bench(*words: str, code: str = BARE, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *SMALL, *words]
    return subprocess.run(
        command, env=environment(**settings), capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
def test_it_runs_whole_on_the_simulated_device(tmp_path: Path) -> None:
    """Slow: the tests below run its parts."""
    tests, file = Path(__file__).parent.parent / "gpu" / "test_pinning.py", tmp_path / "gpu.json"
    parts = "environment,registration,copies,step,tests,training,models"
    done = bench("--json", str(file), "--tests", str(tests), "--part", parts)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["made_by"] == "bench gpu" and found["failures"] == {}
    assert found["is_complete"] and found["is_simulated"]
    assert found["environment"]["facts"]["name"] == "simulated device 0"
    assert [(row.get("is_touched"), row["num_bytes"]) for row in found["registration"]] == [
        (False, 2 << 20), (True, 2 << 20), (None, 900 << 40),
    ]  # fmt: skip
    assert all(row["is_pinned"] for row in found["registration"][:2])
    kinds = {(row["num_bytes"], row["direction"], row["is_pinned"]) for row in found["copies"]}
    assert len(kinds) == len(found["copies"]) == 2 * 3 * 2 and all(
        row["bytes_s"] > 0 for row in found["copies"]
    )
    moved = {
        (row["states"], row["form"]): row["num_bytes"] / row["numel"]
        for row in found["step"]["rows"]
    }
    assert moved == {
        ("exact", "torch operations"): 28,
        ("compact", "torch operations"): 18,
        ("tiny", "torch operations"): pytest.approx(14 + 4 / 64, rel=1e-3),
        ("norm", "torch operations"): 2,
    }
    assert (
        all(row["step_s"] > 0 for row in found["step"]["rows"]) and found["step"]["failures"] == {}
    )
    assert (
        found["tests"]["num_passed"],
        found["tests"]["num_failed"],
        found["tests"]["num_skipped"],
    ) == (4, 0, 0)
    training = found["training"]
    assert training["passed"] and set(training["runs"]) == {
        "cpu",
        "weights",
        "host",
        "nvme",
        "device",
    }
    assert training["warnings"] == []
    assert training["runs"]["nvme"]["nvme_read_bytes"] > 0
    # the plan counts the most that a step takes, and no activations
    device = training["runs"]["device"]
    assert 0.5 < device["peak_allocated_bytes"] / device["plan_device_bytes"] < 2
    assert found["models"] == {
        "not_run": "`tiermem train` needs transformers, rich, typer, which this Python has not"
    }
    for words in (
        *parts.split(","),
        "2.0 MiB, touched",
        "pinned / pageable",
        "4 passed",
        "equal to the bit",
        "the device is simulated: no figure here is a GPU's",
        "no picture: matplotlib is not installed",
        "all went well",
    ):
        assert words in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["gpu.json"]


@pytest.mark.slow
def test_passes_traces_and_a_large_model_run_on_the_simulated_device(tmp_path: Path) -> None:
    """With a made-up compute-sanitizer, which runs the program; by `tiermem train`, with fewer
    layers than the shape has.

    Peers are left out beside a simulated device.
    """
    folder, asked, file = tmp_path / "bin", tmp_path / "asked", tmp_path / "gpu.json"
    folder.mkdir()
    (folder / "compute-sanitizer").write_text(CHECKER)
    (folder / "compute-sanitizer").chmod(0o755)
    settings = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "ASKED": str(asked),
        "ERRORS": "0",
    }
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    words = [
        "--model",
        str(tmp_path / "config.json"),
        "--model-layers",
        "2",
        "--model-seq",
        "32",
        "--model-batch",
        "1",
    ]
    words += [
        "--part",
        "environment,passes,trace,models",
        "--model-steps",
        "3",
        "--json",
        str(file),
    ]
    done = bench(*words, code=WHOLE, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [
        found["passes"][name]["is_equal"]
        for name in ("as it is", "blocking launches", "memory checker")
    ] == [True] * 3
    assert asked.read_text().split() == [
        "--tool",
        "memcheck",
        "--report-api-errors",
        "no",
        "--error-exitcode",
        "86",
    ]
    assert (
        set(found["trace"]) == {"host", "nvme"}
        and found["trace"]["host"]["hidden"]["both"]["share"] is None
    )
    assert "the profiler names no copies of this device" in done.stdout
    rows = found["models"]["rows"]
    assert [(row["who"], row["tier"], row["layers"], row["of_layers"]) for row in rows] == [
        ("tiermem, all on the device", "device", 2, 3), ("tiermem, host", "host", 2, 3), ("tiermem, nvme", "nvme", 2, 3),
    ]  # fmt: skip
    device, host, nvme = rows
    assert host["losses"] == nvme["losses"] and all(row["tokens_per_s"] > 0 for row in rows)
    assert all(row["device"] == "sim:0" and row["device_peak_bytes"] > 0 for row in rows)
    assert device["device_peak_bytes"] > 10 * device["num_params"] > 0
    assert nvme["nvme_bytes_a_step"][0] > 0 and not (
        host["nvme_bytes_a_step"][0] or device["nvme_bytes_a_step"][0]
    )
    assert "for the README" not in done.stdout and "tokens/s" in done.stdout
    traces = ["gpu.host.trace.json", "gpu.nvme.trace.json"]
    made = {"asked", "bin", "config.json", "gpu.json", "gpu.png", *traces}
    assert {each.name for each in tmp_path.iterdir()} == made
    assert all(
        json.loads((tmp_path / name).read_text())["made_by"] == gpu.MADE_BY for name in traces
    )
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


SMALL_7B = """
import json, sys
from pathlib import Path
from bench import gpu_models
gpu_models.HOMES = {"host": "cpu"}
shape = json.loads(sys.argv.pop())
gpu_models.MANY_TOKENS.update(shape=shape, seq=64)
gpu_models.PRESETS["8b"].update(shape)
run = gpu_models.ModelRun(seq=16, batch=1, steps=2)
print(json.dumps(gpu_models.train_models(run, Path(sys.argv.pop()), False)))
"""


@pytest.mark.slow
def test_a_row_of_many_tokens_is_trained_on_the_simulated_device(tmp_path: Path) -> None:
    """Of 148 x 64 tokens by a small model, whose loss is computed in chunks."""
    folders = os.pathsep.join([environment()["PYTHONPATH"], str(Path(__file__).parents[1])])
    words = ["-c", SMALL_7B, str(tmp_path), json.dumps(SHAPE)]
    found = json.loads(python(*words, PYTHONPATH=folders).splitlines()[-1])
    (_, many), failures = found["rows"], found["failures"]
    assert failures == {} and (many["who"], many["layers"]) == (
        "tiermem, 7B of 148 x 1024 tokens",
        3,
    )
    assert (many["batch"], many["seq"], many["device"]) == (148, 64, "sim:0") and many[
        "tokens_per_s"
    ] > 0


class Processes:
    """Stands for run_process: writes the figures that a process would write, and keeps the command
    lines."""

    def __init__(self, *ends: tuple[Any, int | None, str]) -> None:
        self.ends, self.commands = list(ends), []  # type: ignore[var-annotated]

    def __call__(
        self, command: list[str], timeout_s: float, environment: Any = None, cwd: Any = None
    ) -> Done:
        figures, status, output = self.ends.pop(0)
        self.commands.append((command, environment))
        if figures is not None:
            Path(command[command.index("--json") + 1]).write_text(json.dumps(figures))
        return Done(status, output)


def figures(loss: float, **failures: str) -> dict[str, Any]:
    return {
        "runs": {place: {"losses": [4.0, loss]} for place in (*SAME, "device")},
        "failures": failures,
        "warnings": [],
    }


def test_each_pass_is_compared_with_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also a checker's errors, one that cannot run the program, and one that takes too long."""
    monkeypatch.setattr(gpu_passes.shutil, "which", lambda name: f"/bin/{name}")
    summary, gave = "========= ERROR SUMMARY: {} errors", "compute-sanitizer gave no result: it"
    for checked, expected in (
        ((figures(3.0), 0, summary.format(0)), {"is_equal": True, "num_errors": 0}),
        ((figures(3.0), 86, summary.format(3)), {"is_equal": True, "num_errors": 3}),
        ((None, 1, "Device not supported"), {"not_run": f"{gave} ended with status 1: Device not supported"}),
        ((None, None, "slow"), {"not_run": f"{gave} did not end in 300 s: slow"}),
    ):  # fmt: skip
        ran = Processes(
            (figures(3.0), 0, ""),
            (figures(3.5), 0, "done"),
            checked,
            (None, 1, "CUDASanitizerErrors"),
        )
        monkeypatch.setattr(gpu_passes, "run_process", ran)
        found = gpu_passes.run_passes(Sizes(), tmp_path)
        assert found["as it is"]["is_equal"] and not found["blocking launches"]["is_equal"]
        assert expected.items() <= found["memory checker"].items()
        assert found["stream checker"]["is_advice"] and not found["stream checker"]["is_equal"]
        faults = ["blocking launches: its losses differ, so streams race"]
        faults += ["memory checker: 3 errors"] * bool(found["memory checker"].get("num_errors"))
        assert faults_of(a_report(passes=found)) == faults
    environments = [given for _, given in ran.commands]
    assert all(given["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" for given in environments)
    assert ["CUDA_LAUNCH_BLOCKING" in given for given in environments] == [
        False,
        True,
        False,
        False,
    ]
    assert ran.commands[2][0][0] == "compute-sanitizer" and all(
        "--fill" in command for command, _ in ran.commands
    )
    monkeypatch.setattr(gpu_passes.shutil, "which", lambda name: None)
    monkeypatch.setattr(
        gpu_passes,
        "run_process",
        Processes((figures(3.0), 0, ""), (figures(3.0), 0, ""), (None, 1, "")),
    )
    found = gpu_passes.run_passes(Sizes(), tmp_path)
    assert found["memory checker"] == {"not_run": "compute-sanitizer is not installed"}
    assert faults_of(a_report(passes=found)) == []
    monkeypatch.setattr(gpu_passes, "run_process", Processes((None, 1, "no kernel image")))
    with pytest.raises(RuntimeError, match="status 1: no kernel image"):
        gpu_passes.run_passes(Sizes(), tmp_path)


def test_a_large_model_has_the_layers_that_fit_and_peers_beside_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        gpu_models.importlib.util, "find_spec", lambda name: None if name == "deepspeed" else name
    )
    monkeypatch.setattr(gpu_models, "free_host_bytes", lambda: 64 << 30)
    monkeypatch.setattr(gpu_models, "free_and_total", lambda device: (80 << 30, 80 << 30))
    monkeypatch.setattr(
        gpu_models.shutil, "disk_usage", lambda folder: argparse.Namespace(free=1 << 40)
    )
    run = {
        "name": "x",
        "forward_s": [9.0, 1.0, 2.0],
        "backward_s": [9.0, 2.0, 4.0],
        "step_s": [9.0, 1.0, 1.0],
    }
    run |= {
        "tokens_per_s": 100.0,
        "device": "cuda:0",
        "device_memory": {"peak_allocated_bytes": 7},
        "losses": [3.0],
    }
    dead = {
        "name": "plain in-memory",
        "error": {"message": "CUDA out of memory.\nTried"},
        "outcome": "ended with status 1",
    }
    ran = Processes(
        (run, 0, ""),
        ({**run, "peers": [dead]}, 3, ""),
        (None, 2, "tiermem train: no room"),
        (run, 0, ""),
    )
    monkeypatch.setattr(gpu_models, "run_process", ran)
    found = gpu_models.train_models(ModelRun(), tmp_path, has_peers=True)
    device, ours, peer, many = found["rows"]
    assert (device["who"], device["layers"]) == ("tiermem, all on the device", 11)
    assert (ours["who"], ours["layers"], ours["why_fewer"]) == (
        "tiermem, host",
        8,
        "48.00 GiB of host may be used",
    )
    assert (ours["forward_s"], ours["backward_s"], ours["device_peak_bytes"]) == (
        1.5,
        3.0,
        7,
    ) and "failed" not in ours
    assert (peer["who"], peer["tokens_per_s"], peer["error"]) == (
        "plain in-memory",
        None,
        "CUDA out of memory.",
    )
    commands = [command for command, _ in ran.commands]
    assert ["peers" in command for command in commands] == [False, True, False, False]
    on_device, host, nvme, of_7b = commands
    assert "--peer-python" not in host and on_device[on_device.index("--offload") + 1] == "none"
    assert [host[host.index(word) + 1] for word in ("--offload", "--layers", "--states")] == [
        "cpu",
        "8",
        "exact",
    ]
    assert [nvme[nvme.index(word) + 1] for word in ("--offload", "--layers", "--resident")] == [
        "nvme",
        "32",
        "0",
    ]
    assert (many["who"], many["layers"], many["of_layers"]) == (
        "tiermem, 7B of 148 x 1024 tokens",
        13,
        28,
    )
    words = [of_7b[of_7b.index(word) + 1] for word in ("--offload", "--states", "--batch", "--seq")]
    assert words == ["cpu", "compact", "148", "1024"]
    assert "no room" in found["failures"]["nvme"]
    monkeypatch.setattr(gpu_models, "run_process", Processes(*[(None, 2, "no room")] * 3))
    found = gpu_models.train_models(ModelRun(SHAPE), tmp_path, has_peers=False)
    assert list(found["failures"]) == ["all on the device", "host", "nvme"]


@pytest.mark.usefixtures("forked_python")
def test_a_training_is_traced_on_a_device_without_kernels(tmp_path: Path) -> None:
    """On the CPU: the profiler runs, and tells that it saw no copies; nothing that overlaps changes
    a loss."""
    words = [
        "-m",
        "bench.small_training",
        "--places",
        "cpu",
        "--folder",
        str(tmp_path),
        "--steps",
        "3",
    ]
    words += [
        "--width",
        "32",
        "--blocks",
        "1",
        "--samples",
        "4",
        "--json",
        str(tmp_path / "a.json"),
    ]
    command = [sys.executable, *words, "--trace", str(tmp_path / "cpu.trace.json")]
    done = subprocess.run(command, timeout=200, cwd=TESTS)
    assert done.returncode == 0
    run = json.loads((tmp_path / "a.json").read_text())["runs"]["cpu"]
    assert run["hidden"]["both"]["share"] is None and run["num_traced_steps"] == 1
    assert run["losses"] == train_in("cpu", Sizes(32, 1, 4, 3), tmp_path)["losses"]
    assert hidden_share(read_trace(tmp_path / "cpu.trace.json")) == run["hidden"]
    with pytest.raises(ValueError, match="2 steps are to be traced; give at least 3"):
        profiled(lambda after_step: {}, 2, tmp_path / "b.json")


MEASURED = """
from tiermem.swap.memory.accelerator import find_device
from tiermem.tools.measure.gpu_link import measure_beside_copies, measure_link
import torch
device, module = find_device(), torch.get_device_module("sim")
print(measure_link(torch.device("cpu")), measure_link(device, 1_000_001, 0.001) > 1e6, module.copies()["num_pageable"])
print(measure_beside_copies(device, lambda: None, 1, 10_001, 0.001) > 0)
print(module.copies()["to_device_bytes"] == module.copies()["to_host_bytes"] > 0, module.registered())
"""


@pytest.mark.slow
def test_the_link_is_measured_with_pinned_copies_both_ways() -> None:
    """Of the simulated device, in pieces of any size; nothing stays pinned, and a CPU has no
    link."""
    said = python("-c", MEASURED).splitlines()
    assert (
        said[:2] == ["None True 0", "True"]
        and said[2].startswith("True")
        and "num_bytes=0" in said[2]
    ), said


def test_a_machine_without_an_accelerator_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one here")
    assert gpu.main([]) == gpu.EXIT_USER
    assert "no accelerator: torch" in capsys.readouterr().err
    assert gpu.main(["--part", "copies,music"]) == gpu.EXIT_USER
    assert "--part is 'music'; allowed are environment, registration" in capsys.readouterr().err


def test_a_part_that_fails_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(
        "tiermem.swap.memory.accelerator.find_device", lambda: torch.device("meta", 0)
    )
    monkeypatch.setattr("tiermem.swap.memory.accelerator.is_accelerator", lambda device: True)
    monkeypatch.setattr(
        "tiermem.swap.memory.accelerator.facts_of", lambda device: {"name": "NVIDIA H200"}
    )
    monkeypatch.setattr(gpu, "measure_registration", fails)
    monkeypatch.setattr(gpu, "run_tests", lambda paths: {"not_run": "pytest is not installed"})
    file = tmp_path / "gpu.json"
    assert gpu.main(["--part", "registration,tests", "--json", str(file)]) == gpu.EXIT_FAILED
    said = capsys.readouterr().out
    assert "RuntimeError: CUDA error: invalid argument" in said
    assert "not run: pytest is not installed" in said and "registration failed" in said
    assert "Traceback" in json.loads(file.read_text())["failures"]["registration"]


def test_losses_that_differ_are_a_failure() -> None:
    runs = {place: {"losses": [4.0, 3.0]} for place in (*SAME, "cpu", "device")}
    assert compare(runs) == {
        "is_equal_to_the_bit": True,
        "apart": {"cpu": 0.0, "device": 0.0},
        "passed": True,
    }
    runs["nvme"] = {"losses": [4.0, 3.0000001]}
    assert not compare(runs)["is_equal_to_the_bit"] and not compare(runs)["passed"]
    runs["nvme"], runs["cpu"] = runs["host"], {"losses": [4.0, float("nan")]}
    assert compare(runs)["apart"]["cpu"] == float("inf") and not compare(runs)["passed"]


def test_totals_are_those_of_pytest() -> None:
    found = totals_of(
        ElementTree.fromstring(
            '<testsuites><testsuite><testcase classname="a" name="b"/><testcase classname="a" '
            'name="c"><skipped/></testcase>'
            '<testcase classname="a" name="d"><failure message="1 != 2"/><error message="left '
            'behind"/></testcase>'
            "</testsuite></testsuites>"
        )
    )
    failed = [{"test": "a::d", "message": "1 != 2"}]
    assert found == {"num_passed": 1, "num_failed": 1, "num_skipped": 1, "failed": failed}


def test_a_process_that_does_not_end_is_ended_and_keeps_what_it_said() -> None:
    code = "import sys, time; print('begun', flush=True); time.sleep(60)"
    done = run_process([sys.executable, "-c", code], 1.0)
    assert done.status is None and done.last_line == "begun"
    assert run_process([sys.executable, "-c", "raise SystemExit(7)"], 30.0).status == 7


def test_layers_are_those_that_room_holds_beside_embedding_and_head() -> None:
    sizes = ModelSizes.of({**llama(4096, 14336, 32, 32, 128256), "num_key_value_heads": 8})
    whole = 2 * 128256 * 4096 + 32 * sizes.block_numel
    assert abs(whole - 8.03e9) < 1e8
    assert layers_that_fit(sizes, 18 * whole, 18) == 32 and layers_that_fit(sizes, 1e15, 18) == 32
    assert layers_that_fit(sizes, 18 * whole - 1, 18) == 31
    assert layers_that_fit(sizes, 18 * 2 * 128256 * 4096, 18) == 0


def a_row(who: str, tier: str, **changes: Any) -> dict[str, Any]:
    return {
        "who": who, "tier": tier, "layers": 30, "of_layers": 32, "batch": 4, "seq": 2048, "device": "cuda:0",
        "forward_s": 1.5, "backward_s": 3.25, "step_s": 0.5, "tokens_per_s": 1560.4, "device_peak_bytes": 12 << 30,
        "peak_rss_bytes": 100 << 30, "outcome": "finished", "error": None, **changes,
    }  # fmt: skip


def a_report(**parts: Any) -> dict[str, Any]:
    machine = {
        "cpu": "x",
        "num_cores": 2,
        "memory_bytes": 1 << 30,
        "virtualisation": "none",
        "kernel": "Linux",
    }
    machine |= {"tiermem": "0.1.0", "date": "2026-11-23T10:00:00", "paths": []}
    facts = {
        "facts": {"name": "NVIDIA H200"},
        "device": "cuda:0",
        "num_devices": 1,
        "total_bytes": 1,
        "free_bytes": 1,
    }
    environment = {**facts, "runtimes": {}, "torch": "2.11.0", "driver": "", "link": {}}
    report = {
        "failures": {},
        "is_complete": True,
        "is_simulated": False,
        "machine": machine,
        "environment": environment,
    }
    return {**report, **parts}


def test_models_that_ran_are_rows_for_the_readme_and_others_say_why_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dead = a_row(
        "plain in-memory",
        "host",
        tokens_per_s=None,
        forward_s=None,
        error="CUDA out of memory",
        outcome="ended",
    )
    rows = [a_row("tiermem, host", "host", why_fewer="90.0 GiB of host may be used"), dead]
    report = a_report(models={"rows": rows, "failures": {"nvme": "Traceback\nOSError: no space"}})
    print_report(report)
    said = capsys.readouterr().out
    assert "on cuda:0; 30 of 32 layers (90.0 GiB of host may be used), 4 x 2048 tokens" in said
    assert "30 of 32 layers, 4 x 2048 tokens: CUDA out of memory" in said
    assert "OSError: no space" in said and faults_of(report) == ["the model (nvme) failed"]
    assert "| tiermem, host | 30 | 1.50 | 3.25 | 0.50 | 1,560 | 12.00 GiB | 100.00 GiB |" in said
    assert len(readme_table(report["models"], "x", "y")) == 3  # the peer that died has no row


def test_a_pass_whose_losses_differ_is_a_race_and_advice_is_none() -> None:
    wrong = {
        "is_equal": False,
        "num_errors": 0,
        "is_advice": False,
        "why": "it ended with status 0: -",
    }
    passes = {
        "blocking launches": wrong,
        "stream checker": {**wrong, "is_advice": True},
        "memory checker": {"not_run": "-"},
    }
    assert faults_of(a_report(passes=passes)) == [
        "blocking launches: its losses differ, so streams race"
    ]


@pytest.mark.usefixtures("forked_python")
def test_a_report_that_came_from_elsewhere_is_shown_and_drawn(tmp_path: Path) -> None:
    """With all panels, from the JSON and its traces; nothing is measured."""
    pytest.importorskip("matplotlib")
    names = ("kernel", "x"), ("gpu_memcpy", "Memcpy HtoD"), ("gpu_memcpy", "Memcpy DtoH")
    events = [{"ph": "X", "cat": cat, "name": name, "ts": 5, "dur": 9} for cat, name in names]
    save_json(tmp_path / "a.host.trace.json", {"made_by": gpu.MADE_BY, "traceEvents": events})
    copies = [
        {"num_bytes": size, "direction": way, "is_pinned": is_pinned, "bytes_s": 1e9 * size}
        for size in (1 << 16, 1 << 18) for way in ("to device", "to host", "both") for is_pinned in (True, False)
    ]  # fmt: skip
    trace = {"host": {"hidden": hidden_share(events), "trace": "a.host.trace.json"}}
    models = {
        "rows": [a_row("tiermem, host", "host"), a_row("fsdp2 all-on-cpu", "host")],
        "failures": {},
    }
    report = a_report(made_by=gpu.MADE_BY, copies=copies, trace=trace, models=models)
    save_json(tmp_path / "a.json", report)
    shown = subprocess.run(  # fonts stay open
        [sys.executable, "-c", WHOLE, "--show", str(tmp_path / "a.json")],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0 and "100.0% of copy time under kernels" in shown.stdout, (
        shown.stdout + shown.stderr
    )
    assert b"tEXtSoftware" in (tmp_path / "a.png").read_bytes()[:4096]
    assert draw_report(a_report(), tmp_path / "b.png") == "nothing was measured that could be drawn"
    save_json(tmp_path / "c.json", {"made_by": "another"})
    assert gpu.main(["--show", str(tmp_path / "c.json")]) == gpu.EXIT_USER
