"""Does `tiermem bench gpu` run whole on an accelerator, without packages that a bare machine lacks, and else say so?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("_tiermem_native")

from on_simulated import environment, python

from tiermem.tools.bench import gpu
from tiermem.tools.bench.small_training import SAME, compare

BARE = """
import sys
sys.modules.update(dict.fromkeys(["rich", "typer", "transformers", "matplotlib", "psutil"]))  # an import of them fails
from tiermem.tools.bench.gpu import main
sys.exit(main(sys.argv[1:]))
"""
SMALL = ["--most", "256KiB", "--seconds", "0.001", "--register", "2MiB,900TiB", "--steps", "3"]
SMALL += ["--width", "64", "--blocks", "2", "--samples", "8"]


def test_it_runs_whole_on_the_simulated_device(tmp_path: Path) -> None:
    tests = Path(__file__).parent.parent / "gpu" / "test_pinning.py"
    done = subprocess.run(
        [sys.executable, "-c", BARE, *SMALL, "--json", str(tmp_path / "gpu.json"), "--tests", str(tests)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["made_by"] == "tiermem bench gpu" and found["failures"] == {}
    assert found["environment"]["facts"]["name"] == "simulated device 0"
    assert [(row.get("is_touched"), row["num_bytes"]) for row in found["registration"]] == [
        (False, 2 << 20), (True, 2 << 20), (None, 900 << 40),
    ]  # fmt: skip
    assert all(row["is_pinned"] for row in found["registration"][:2])
    kinds = {(row["num_bytes"], row["direction"], row["is_pinned"]) for row in found["copies"]}
    assert len(kinds) == len(found["copies"]) == 2 * 3 * 2 and all(row["bytes_s"] > 0 for row in found["copies"])
    assert (found["tests"]["num_passed"], found["tests"]["num_failed"], found["tests"]["num_skipped"]) == (4, 0, 0)
    training = found["training"]
    assert training["passed"] and set(training["runs"]) == {"cpu", "weights", "host", "nvme", "device"}
    assert training["runs"]["nvme"]["nvme_read_bytes"] > 0
    device = training["runs"]["device"]  # the plan counts the most that a step takes, and no activations
    assert 0.5 < device["peak_allocated_bytes"] / device["plan_device_bytes"] < 2
    for words in (
        *gpu.PARTS,
        "2.0 MiB, touched",
        "pinned / pageable",
        "4 passed",
        "equal to the bit",
        "all went well",
    ):
        assert words in done.stdout
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu.json"]


MEASURED = """
from tiermem.swap.accelerator import find_device
from tiermem.tools.bench.gpu import measure_link
import torch
device, module = find_device(), torch.get_device_module("sim")
print(measure_link(torch.device("cpu")), measure_link(device, 1 << 20, 0.001) > 1e6, module.copies()["num_pageable"])
print(module.copies()["to_device_bytes"] == module.copies()["to_host_bytes"] > 0, module.registered())
"""


def test_the_link_is_measured_with_pinned_copies_both_ways() -> None:
    """Of the simulated device; nothing stays pinned, and a CPU has no link."""
    said = python("-c", MEASURED).splitlines()
    assert said[0] == "None True 0" and said[1].startswith("True") and "num_bytes=0" in said[1], said


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

    monkeypatch.setattr("tiermem.swap.accelerator.find_device", lambda: torch.device("meta", 0))
    monkeypatch.setattr("tiermem.swap.accelerator.is_accelerator", lambda device: True)
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
    assert compare(runs) == {"is_equal_to_the_bit": True, "apart": {"cpu": 0.0, "device": 0.0}, "passed": True}
    runs["nvme"] = {"losses": [4.0, 3.0000001]}
    assert not compare(runs)["is_equal_to_the_bit"] and not compare(runs)["passed"]
    runs["nvme"], runs["cpu"] = runs["host"], {"losses": [4.0, float("nan")]}
    assert compare(runs)["apart"]["cpu"] == float("inf") and not compare(runs)["passed"]


def test_totals_are_those_of_pytest() -> None:
    found = gpu._totals(
        ElementTree.fromstring(
            '<testsuites><testsuite><testcase classname="a" name="b"/><testcase classname="a" name="c"><skipped/></testcase>'
            '<testcase classname="a" name="d"><failure message="1 != 2"/><error message="left behind"/></testcase>'
            "</testsuite></testsuites>"
        )
    )
    failed = [{"test": "a::d", "message": "1 != 2"}]
    assert found == {"num_passed": 1, "num_failed": 1, "num_skipped": 1, "failed": failed}
