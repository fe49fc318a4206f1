"""The main job on a model of a few million parameters: train under a cap, end to end, through the
command."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from called import call

pytest.importorskip("_tiermem_native")
pytest.importorskip("transformers")

from tiermem.tools.memory_limit import open_limit
from tiermem.tools.presets import preset

TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 300,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.json").write_text(
        json.dumps(preset("151m") | TINY | {"num_key_value_heads": 4})
    )
    return tmp_path


def command(*arguments: str, model: str = "tiny.json") -> list[str]:
    return [
        sys.executable,
        "-m",
        "tiermem.tools.cli",
        "train",
        "--model",
        model,
        "--seq",
        "32",
        *arguments,
    ]


def train(
    folder: Path, *arguments: str, model: str = "tiny.json"
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = call(folder, *command("--json", "out.json", *arguments, model=model)[3:])
    out = folder / "out.json"
    return done, json.loads(out.read_text()) if out.exists() else {}


def test_a_capped_run_on_nvme_equals_one_in_memory_to_the_bit(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    capped = ("--steps", "4", "--offload", "nvme", "--memory", "700MiB", "--resident", "0")
    done, nvme = train(folder, *capped, "--verbose")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "predicted before the first step, and real" in done.stdout
    assert "where each byte lives" in done.stdout
    assert "weights: made at random" in done.stdout
    request.getfixturevalue("forked_python")  # no cap holds it
    done, cpu = train(folder, "--steps", "4", "--offload", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert nvme["losses"] == cpu["losses"]
    assert nvme["losses"][3] < nvme["losses"][0]
    assert nvme["nvme_read_bytes"] > 0
    assert nvme["memory_limit_bytes"] == 700 << 20
    assert nvme["limit_kind"] != "none"
    assert cpu["limit_kind"] == "none"
    assert nvme["num_params"] == cpu["num_params"]
    assert nvme["state_bytes"] == 14 * nvme["num_params"]
    assert len(nvme["step_s"]) == 4
    assert nvme["disagreements"] == []
    for run in (nvme, cpu):
        said = run["predicted"]
        # of all steps: what is on its way when a step ends is counted in the next one
        assert 4 * said["nvme_written_bytes"] == run["nvme_written_bytes"]
        assert said["disk_bytes"] == run["nvme_peak_bytes"]
        assert said["host_bytes"] == pytest.approx(run["host_peak_bytes"], rel=0.01)
        assert min(said["forward_s"], said["backward_s"], said["step_s"]) > 0
        limits_s = run["limits_s"]
        assert (
            set(limits_s) == {"compute", "disk", "link", "kernels"}
            and limits_s["compute"] > 0 < limits_s["kernels"]
        )
        assert (limits_s["disk"] > 0, limits_s["link"]) == (run is nvme, 0)
        assert limits_s[run["limited_by"]] == max(limits_s.values())
        assert len(run["iteration_s"]) == 4 and run["steps_redone"] == run["redone_bytes"] == 0
    # without a cap nothing is scarce
    assert nvme["choice"].startswith("planned by ") and cpu["choice"] is None


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an instruction set of x86-64")
def test_held_down_to_avx2_products_are_made_in_fp32_on_every_tier(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    runs = [train(folder, "--steps", "3", "--offload", offload)[1] for offload in ("nvme", "cpu")]
    assert runs[0]["losses"] == runs[1]["losses"]
    assert all("multiplied in float32" in run["compute"] for run in runs)
    assert all(run["state_bytes"] == 14 * run["num_params"] for run in runs)  # weights in 2 bytes
    done, bf16 = train(folder, "--steps", "1", "--offload", "cpu", "--precision", "bf16")
    assert bf16["compute"] is None
    assert (
        "times slower here than fp32 products" in done.stdout
        and "give --precision auto" in done.stdout
    )


@pytest.mark.slow
def test_a_run_uses_what_was_tuned_and_leaves_its_reports_and_nothing_on_nvme(folder: Path) -> None:
    disk = folder / "disk"
    disk.mkdir()
    tuned = {
        "aio": {"block_size": 1 << 18, "queue_depth": 1, "intra_op_parallelism": 3},
        "tiermem": {
            "engine": "threads",
            "paths": [{"path": str(disk)}],
            "measured": {"made_by": "tiermem tune"},
        },
    }
    (folder / "tiermem.json").write_text(json.dumps(tuned))
    done, out = train(
        folder, "--steps", "2", "--tuned", "tiermem.json", "--resident", "0", "--tbw", "600TB"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) <= 11  # in brief
    assert out["engine"] == "threads"
    assert "3 of them" in out["engine_why"]
    assert list(disk.iterdir()) == []
    (path,) = out["paths"]
    assert path["path"] == str(disk)
    assert path["written_bytes"] == out["nvme_written_bytes"]
    assert 0 < path["written_bytes"] <= path["since_made_bytes"]
    assert f"written to {path['path']}: " in done.stdout
    # wherever the console broke the line
    assert "a drive of 600 TBW lasts " in " ".join(done.stdout.split())
    (run,) = (folder / "runs").iterdir()
    assert {file.name for file in run.iterdir()} - {"output.log"} == {
        "events.jsonl",
        "job.json",
        "loss.png",
        "memory.png",
        "run.json",
        "timeline.png",
        "trace.json",
    }
    trace = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {"forward", "backward", "step", "read", "write"} <= {event.get("cat") for event in trace}


def test_a_cap_below_the_budget_is_refused_with_the_arithmetic(folder: Path) -> None:
    done, _ = train(folder, "--memory", "300MiB")
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(
        r"--memory 300.0 MiB is too small .*; write: tiermem train .* --memory \d+MiB", done.stderr
    )
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_a_run_killed_at_the_cap_says_so(folder: Path) -> None:
    with open_limit(1 << 30) as limit:
        if limit.kind == "watch":
            pytest.skip(f"no kernel-held cap here: {limit.why}")
    ds = {
        "optimizer": {"type": "AdamW"},
        "tiermem": {"host_bytes": 1 << 20},
    }  # its own budget: no plan is looked at before
    (folder / "ds.json").write_text(json.dumps(ds))
    done, out = train(folder, "--memory", "64MiB", "--config", "ds.json")
    assert done.returncode == 137
    assert "killed at the cap of 64.0 MiB during the imports" in done.stderr
    assert out["is_killed_at_cap"]


@pytest.mark.usefixtures("forked_python")
def test_an_interrupt_finishes_the_step_and_reports(folder: Path) -> None:
    with subprocess.Popen(
        command("--steps", "100000"), cwd=folder, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if ": step 2/" in line:
                run.send_signal(signal.SIGINT)
                break
        rest = run.stdout.read()
    assert run.returncode == 130, rest
    assert "stopped as asked, cleanly" in rest
    (folder_of_run,) = (folder / "runs").iterdir()
    saved = json.loads((folder_of_run / "run.json").read_text())
    assert 2 <= len(saved["losses"]) < 100_000
    assert saved["kernel_read_bytes"] is not None
    assert not [file for file in folder_of_run.iterdir() if file.name.startswith("tiermem-")]


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_trainer_with_it(folder: Path) -> None:
    with subprocess.Popen(
        command("--steps", "100000"), cwd=folder, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if ": step 1/" in line:
                children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
                run.kill()
                break
    deadline = time.monotonic() + 30
    while (
        any(os.path.exists(f"/proc/{pid}/exe") for pid in children) and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in children)
    (folder_of_run,) = (folder / "runs").iterdir()
    assert not [file for file in folder_of_run.iterdir() if file.name.startswith("tiermem-")]


@pytest.mark.usefixtures("forked_python")
def test_a_wrong_config_is_one_line(folder: Path) -> None:
    (folder / "ds.json").write_text(
        json.dumps({"zero_optimisation": {}, "optimizer": {"type": "AdamW"}})
    )
    done, _ = train(folder, "--config", "ds.json")
    assert done.returncode == 2
    assert "zero_optimization" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list((folder / "runs").iterdir()) == []


@pytest.mark.usefixtures("forked_python")
def test_a_checkpoint_is_trained_on_and_a_config_file_decides_all_that_it_names(
    folder: Path,
) -> None:
    """Its experts lie in files of transformers under other names than in the model."""
    import torch
    import transformers

    from tiermem.tools.corpus import Corpus

    torch.manual_seed(3)
    tiny = json.loads((folder / "tiny.json").read_text())
    shape = tiny | {"model_type": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 32}
    shape |= {"num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.AutoConfig.for_model(**shape)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text(json.dumps(shape))
    done, _ = train(folder, "--steps", "2", model="checkpoint")
    assert done.returncode == 2 and "checkpoint has no *.safetensors: give" in done.stderr
    model.save_pretrained(folder / "checkpoint")
    ds = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    (folder / "ds.json").write_text(json.dumps(ds))
    done, out = train(folder, "--config", "ds.json", "--steps", "2", model="checkpoint")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "made at random" not in done.stdout
    corpus = Corpus([], 32, 0)
    micro_batches = [corpus.batch(number, 2, torch.device("cpu")) for number in range(2)]
    expected = sum(float(model(**batch).loss.detach()) for batch in micro_batches) / 2
    assert out["losses"][0] == pytest.approx(expected, rel=1e-5)
    assert len(out["losses"]) == 2
    assert out["state_bytes"] == 12 * out["num_params"]  # fp32
