"""Does a record keep what a run told, to the bit and in bounded memory?"""

from __future__ import annotations

import json
from pathlib import Path

from tiermem.tools.job.launcher import Outcome, Sample
from tiermem.tools.memory_limit import Charge
from tiermem.tools.record.run_record import RunRecord, Series, median_after_warm_up
from tiermem.tools.words import save_json


def step(number: int, loss: float, seconds: float = 1.0) -> dict[str, object]:
    times = {"forward_s": seconds, "backward_s": seconds, "step_s": 2 * seconds}
    moved = {"nvme_read_bytes": 100 * number, "nvme_written_bytes": 50 * number}
    return {"kind": "step", "step": number, "loss": loss, "tokens": 128, **times, **moved}


def outcome() -> Outcome:
    return Outcome(0, "close", "none", None, False, False, False, 7, Charge(), None, 1.0)


def test_losses_read_back_to_the_bit(tmp_path: Path) -> None:
    record = RunRecord()
    losses = [0.1 + 0.2, 1 / 3, 9.399864196777344, 5e-324]
    for number, loss in enumerate(losses, 1):
        record.on_message(step(number, loss))
    record.outcome = outcome()
    save_json(tmp_path / "run.json", record.summary())
    assert json.loads((tmp_path / "run.json").read_text())["losses"] == losses
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_the_documented_keys_are_there_even_for_a_run_that_died() -> None:
    record = RunRecord()
    record.outcome = outcome()
    keys = (
        "losses forward_s backward_s step_s iteration_s limits_s steps_redone redone_bytes "
        "limited_by "
        "tokens_per_s peak_rss_bytes memory_limit_bytes limit_kind nvme_read_bytes "
        "nvme_written_bytes num_params state_bytes kernel_read_bytes kernel_written_bytes "
        "cgroup_peak_bytes engine versions"
    )
    assert set(keys.split(" ")) <= set(record.summary())


def test_medians_leave_the_first_step_out() -> None:
    assert median_after_warm_up([100.0, 1.0, 2.0, 3.0]) == 2.0
    assert median_after_warm_up([100.0]) == 100.0
    assert median_after_warm_up([]) is None
    record = RunRecord()
    for message in (step(1, 9.0, 50.0), step(2, 8.0), step(3, 7.0)):
        record.on_message(message)
    assert record.summary()["tokens_per_s"] == 32.0


def test_a_run_without_a_disk_is_not_held_to_the_counts_of_the_kernel() -> None:
    """Its process reads program code, and an accelerator's libraries write caches."""
    counts = {
        "nvme_read_bytes": 0,
        "nvme_written_bytes": 0,
        "kernel_read_bytes": 1 << 30,
        "kernel_written_bytes": 1 << 30,
    }
    for paths, num_disagreements in (([], 0), ([{"path": "/disk", "bytes": 0}], 2)):
        record = RunRecord()
        record.on_message({"kind": "done", **counts, "paths": paths})
        assert len(record.disagreements()) == num_disagreements


def test_bytes_of_a_run_that_died_are_those_of_its_last_step() -> None:
    record = RunRecord()
    record.on_message({"kind": "ready", "read_bytes": 10, "written_bytes": 20})
    record.on_message(step(1, 9.0))
    summary = record.summary()
    assert (summary["nvme_read_bytes"], summary["nvme_written_bytes"]) == (90, 30)


def test_paths_and_the_time_of_training_are_kept() -> None:
    record = RunRecord()
    for number, seconds in ((1, 2), (2, 5)):
        record.on_message(
            {**step(number, 9.0), "start_ns": seconds * 10**9, "end_ns": (seconds + 1) * 10**9}
        )
    record.on_message({"kind": "done", "paths": [["/a", 10, 25]]})
    summary = record.summary()
    assert summary["paths"] == [{"path": "/a", "written_bytes": 10, "since_made_bytes": 25}]
    assert summary["training_s"] == 4.0
    assert RunRecord().summary()["paths"] == []
    assert RunRecord().summary()["training_s"] == 0.0


def test_counts_that_differ_are_told() -> None:
    record = RunRecord()
    counts = {"nvme_read_bytes": 10**9, "nvme_written_bytes": 10**9, "kernel_read_bytes": 10**9}
    record.on_message({"kind": "done", **counts, "kernel_written_bytes": 2 * 10**9})
    assert len(record.disagreements()) == 1


def test_a_long_run_keeps_few_samples_and_every_peak() -> None:
    series = Series(max_samples=16)
    for i in range(1000):
        series.add(Sample(i, 100 if i == 777 else 1, None if i % 2 else i))
    assert len(series.samples) < 16
    assert max(sample.resident_bytes for sample in series.samples) == 100
    times = [sample.time_ns for sample in series.samples]
    assert times == sorted(times)


def test_bytes_of_a_step_are_those_between_two_ends() -> None:
    record = RunRecord()
    assert record.summary()["nvme_read_bytes_a_step"] is None
    for number in (1, 2, 3, 5):
        record.on_message(step(number, 9.0) | {"nvme_bytes": 10 * number})
    summary = record.summary()
    assert (summary["nvme_read_bytes_a_step"], summary["nvme_written_bytes_a_step"]) == (
        150,
        75,
    )  # 100 and 200, 50 and 100
    assert summary["nvme_peak_bytes"] == 50


def test_an_iteration_is_limited_by_what_was_busy_longest() -> None:
    """Medians of the steps after the first, which warms up."""
    record = RunRecord()
    for number, compute_s in enumerate((99.0, 7.0, 8.0, 6.0), 1):
        limits = {"compute": compute_s, "disk": 6.5, "link": 0.0, "kernels": 1.5}
        record.on_message(
            {**step(number, 9.0), "start_ns": 0, "end_ns": 10**10, "limits_s": limits}
        )
    summary = record.summary()
    assert summary["iteration_s"] == [10.0] * 4
    assert summary["limits_s"] == {"compute": 7.0, "disk": 6.5, "link": 0.0, "kernels": 1.5}
    assert summary["limited_by"] == "compute"
