"""Does a person see what a run takes of its accelerator, and what to change when that is too
little?"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from bench.peers.compare import peers_table
from fake_run import DEVICE_FIELDS, MIB
from on_simulated import environment, python

from tiermem.forecast import Rates
from tiermem.policy import Tier
from tiermem.tools.job.launcher import Job, Outcome
from tiermem.tools.job.train_job import make_config
from tiermem.tools.memory_limit import Charge
from tiermem.tools.options import TrainOptions
from tiermem.tools.plan.planned import Cluster, Planned, Scenario, plan_scenario
from tiermem.tools.record.reports import plan_table, predicted_table, result_table
from tiermem.tools.record.run_record import RunRecord
from tiermem.tools.train.training import device_fields, out_of_memory_in, remedy_of

PLAN = [
    ["resident parameters", "DEVICE", 30 * MIB, "present all the time"],
    ["gradients", "HOST", 80 * MIB, "rest on HOST until the step"],
    ["parameters", "DEVICE", 40 * MIB, "rest on DEVICE"],
]
STEP = {
    "kind": "step",
    "step": 1,
    "loss": 7.0,
    "tokens": 4,
    "forward_s": 1.0,
    "backward_s": 1.0,
    "step_s": 1.0,
}
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip


def job_of(**settings: Any) -> Job:
    values = {"batch": 4, "seq": 128, "is_checkpointing": False, "config": {}}
    others = dict.fromkeys(("name", "precision"), "") | {key: [] for key in ("data", "nvme_paths")}
    rest = {
        "shape": {},
        "checkpoint": None,
        "steps": 1,
        "seed": 0,
        "threads": None,
        "events_file": None,
    }
    return Job(**{**rest, **others, "memory_limit_bytes": None, **values, **settings})


def summary_of(fields: dict[str, Any]) -> dict[str, Any]:
    record = RunRecord()
    predicted = {f"{phase}_s": 1.0 for phase in ("forward", "backward", "step")}
    predicted |= dict.fromkeys(
        ("nvme_read_bytes", "nvme_written_bytes", "disk_bytes", "host_bytes", "peak_bytes"), 0
    )
    record.on_message(
        {
            "kind": "ready",
            "plan": PLAN,
            "predicted": {**predicted, "device_bytes": 100 * MIB},
            **fields,
        }
    )
    record.on_message({**STEP, **fields})
    record.outcome = Outcome(0, "close", "none", None, False, False, False, 7, Charge(), None, 1.0)
    return {"name": "tiermem tiny", **json.loads(json.dumps(record.summary()))}


@pytest.mark.parametrize(("steps_early", "predicted_s"), [(0, 2.0), (1, 1.0)])
def test_a_run_is_compared_with_the_prediction_of_steps_like_its_own(
    steps_early: int, predicted_s: float
) -> None:
    """Whether they begin under backward shows in the run: one that clips begins none."""
    record = RunRecord()
    record.on_message(
        {"kind": "ready", "predicted": {"step_s": 1.0, "host_bytes": 7, "late": {"step_s": 2.0}}}
    )
    record.on_message(STEP)
    record.on_message({"kind": "done", "steps_early": steps_early})
    record.outcome = Outcome(0, "close", "none", None, False, False, False, 7, Charge(), None, 1.0)
    predicted = record.summary()["predicted"]
    assert (predicted["step_s"], predicted["host_bytes"]) == (predicted_s, 7)


def text_of(table: Table | None) -> str:
    assert table is not None
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_tables_and_json_have_the_sums_of_a_run_on_an_accelerator() -> None:
    run = summary_of(DEVICE_FIELDS)
    assert run["device_memory"] == {**DEVICE_FIELDS["device_memory"], "plan_bytes": 70 * MIB}
    result = text_of(result_table(run))
    assert "memory of cuda:0" in result
    assert "peak; 100.0 MiB at the end, 70.0 MiB of them planned to rest there" in result
    assert "peak; 300.0 MiB at the end, of 20.00 GiB, 19.00 GiB free" in result
    plan = text_of(plan_table({"plan": PLAN, **DEVICE_FIELDS}))
    assert (
        "= DEVICE" in plan
        and "70.0 MiB" in plan
        and "of 20.00 GiB of cuda:0, 19.00 GiB free now" in plan
    )
    assert "100.0 MiB  200.0 MiB             0.500" in text_of(predicted_table(run))
    other = summary_of({})
    both = text_of(peers_table([run, other]))
    assert "peak GPU" in both and "200.0 MiB" in both


def test_a_run_on_the_cpu_says_nothing_of_a_device() -> None:
    run = summary_of({})
    assert run["device_memory"] is None
    assert device_fields(torch.device("cpu")) == {}
    for table in (result_table(run), plan_table({"plan": PLAN[1:2]}), peers_table([run])):
        assert (
            "DEVICE" not in text_of(table)
            and "GPU" not in text_of(table)
            and "device" not in text_of(table)
        )


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "a --batch below 4, a --seq below 128, --checkpointing or --offload cpu"),
        ({"batch": 1, "is_checkpointing": True}, "a --seq below 128 or --offload cpu"),
        (
            {
                "batch": 1,
                "config": {
                    "zero_optimization": {
                        f"offload_{what}": {"device": "cpu"} for what in ("param", "optimizer")
                    }
                },
            },
            "a --seq below 128 or --checkpointing",
        ),
    ],
)
def test_a_refusal_says_which_options_to_change(settings: dict[str, Any], remedy: str) -> None:
    assert remedy_of(job_of(**settings), is_made=True) == f"give {remedy}"


def test_a_refusal_before_there_is_a_plan_speaks_of_the_model_alone() -> None:
    assert remedy_of(job_of(), is_made=False) == "give a smaller model or --offload cpu"


def test_a_refusal_is_found_behind_the_error_that_it_caused() -> None:
    refusal = torch.OutOfMemoryError("no")
    torn = RuntimeError("the step is torn")
    torn.__cause__ = refusal
    assert out_of_memory_in(torn) is refusal
    assert out_of_memory_in(RuntimeError("another")) is None
    torn.__cause__ = torn  # a chain may be a ring
    assert out_of_memory_in(torn) is None


def refused(folder: Path, **own: Any) -> str:
    """The one line in which a training on a card of 14 MB ends, with its states there. own: keys of
    the section "tiermem"."""
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    config = {
        "bf16": {"enabled": True},
        "optimizer": optimizer,
        "zero_optimization": {"stage": 3},
        "tiermem": own,
    }
    (folder / "ds.json").write_text(json.dumps({**config, "train_micro_batch_size_per_gpu": 8}))
    words = [
        "train",
        "--model",
        "config.json",
        "--config",
        "ds.json",
        "--seq",
        "128",
        "--steps",
        "2",
    ]
    words += ["--no-checkpointing"]
    done = subprocess.run(
        [sys.executable, "-m", "tiermem.tools.cli", *words],
        cwd=folder,
        env=environment(TIERMEM_SIM_CAPACITY="14000000"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2, done.stdout
    assert not any((folder / "runs").iterdir())
    return line


@pytest.mark.slow
def test_training_on_a_card_that_is_too_small_is_refused_before_the_model_is_built(
    tmp_path: Path,
) -> None:
    """Slow: test_card.py holds the refusal and its arithmetic, and the test below that a trainer's
    refusal is one line."""
    line = refused(tmp_path)
    assert line.startswith("tiermem train: the accelerator has too little memory: 13.4 MiB - ")
    assert "(at work)" in line and "and the smallest plan needs" in line
    assert (
        "give a --batch below 8, a --seq below 128, --checkpointing or --offload cpu, or name "
        "tiermem.device_bytes"
    ) in line


@pytest.mark.slow
def test_training_that_runs_out_of_device_memory_ends_in_one_line(tmp_path: Path) -> None:
    """Where the config says that the plan may take nearly all of it."""
    line = refused(tmp_path, device_bytes=13_500_000)
    assert line.startswith("tiermem train: sim:0 has no memory left in backward of step 1: ")
    assert (
        "the plan keeps 11.6 MiB on DEVICE (resident parameters" in line and "--offload cpu" in line
    )


@pytest.mark.slow
def test_training_sends_inputs_of_blocks_from_a_card_that_has_no_room_for_them(
    tmp_path: Path,
) -> None:
    """The choice is that of `plan`, it is in the report, the device holds what it says, and no bit
    of a loss is another."""
    pytest.importorskip("transformers")
    shape = SHAPE | {"num_hidden_layers": 12}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = [
        "--offload",
        "none",
        "--seq",
        "128",
        "--batch",
        "16",
        "--checkpointing",
        "--precision",
        "fp32",
    ]
    options = TrainOptions(
        config=tmp_path / "config.json", offload="none", batch=16, precision="fp32"
    )
    rates, config = (
        Rates(disk_read_bytes_s=1e9, disk_write_bytes_s=1e9),
        make_config(options, [tmp_path]),
    )

    def on_card(num_bytes: int) -> Planned:
        scenario = Scenario(
            shape, config, Cluster(1, 1, num_bytes), rates, 1e12, 128, is_checkpointing=True
        )
        return plan_scenario(scenario, chooses=False)

    small, enough = 0, 1 << 28
    while enough - small > MIB:
        middle = (small + enough) // 2
        small, enough = (middle, enough) if on_card(middle).problems else (small, middle)
    assert on_card(enough).policy.activations is Tier.HOST
    moved = 10 * 16 * 128 * 64 * 4  # of 12 inputs 10 are elsewhere
    capacity = int((enough + moved / 2) / 0.95)

    def out_of(num_bytes: int) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "tiermem.tools.cli", "train", *words, "--model=config.json", "--steps=2", "--json=out.json"],
            cwd=tmp_path, env=environment(TIERMEM_SIM_CAPACITY=str(num_bytes)), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "blocks take 6.0 MiB and " in done.stdout and "device_bytes: " in done.stdout
        return json.loads((tmp_path / "out.json").read_text())  # type: ignore[no-any-return]

    out, roomy = out_of(capacity), out_of(4 * capacity)
    assert "with their inputs on HOST" in out["choice"]
    assert "and stay on the GPU" in roomy["placement"][1]
    assert out["device_memory"]["peak_reserved_bytes"] <= capacity
    assert out["losses"] == roomy["losses"]


@pytest.mark.slow
def test_training_recomputes_blocks_where_a_card_has_no_room_for_what_they_keep(
    tmp_path: Path,
) -> None:
    """Unless it is told to or not to; a resume is free to choose again. No bit of a loss is
    another."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 12}))
    sizes = ["--model=config.json", "--offload=cpu", "--seq=128", "--batch=16", "--precision=fp32"]

    def losses_of(card_bytes: int, *words: str, recomputes: bool, said: str) -> list[float]:
        command = [sys.executable, "-m", "tiermem.tools.cli", "train", "--json=out.json", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(TIERMEM_SIM_CAPACITY=str(card_bytes)), capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        out = json.loads((tmp_path / "out.json").read_text())
        assert out["is_checkpointing"] is recomputes
        assert said in " ".join([*out["placement"], out["choice"]]) and said in done.stdout
        return list(out["losses"])

    small, roomy = 60_000_000, 300_000_000  # autograd keeps 109 MiB
    why = "of 12 blocks are recomputed in backward; memory has room for what the others keep"
    first = losses_of(small, *sizes, "--steps=1", "--save=ck", recomputes=True, said=why)
    why = "no block is recomputed"
    second = losses_of(roomy, "--resume=ck", "--steps=2", recomputes=False, said=why)
    told = losses_of(
        roomy,
        *sizes,
        "--steps=2",
        "--no-checkpointing",
        recomputes=False,
        said="since no block is recomputed",
    )
    assert first + second == told


CONTEXT = """
import sys, torch
from types import SimpleNamespace
from tiermem.tools.train import training

assert not torch.sim.is_initialized()
measure, found = training.resident_of, []
training.resident_of = lambda: found.append(torch.sim.is_initialized()) or measure()
training.load_model_classes(SimpleNamespace(shape=eval(sys.argv[1]), precision="fp32", threads=None))
print(found)
"""


@pytest.mark.slow
def test_the_driver_is_resident_before_a_cap_is_divided() -> None:
    """What the accelerator's context takes of host memory is no part of what the store gets."""
    pytest.importorskip("transformers")
    assert python("-c", CONTEXT, repr(SHAPE)) == "[True]\n"
