"""Is a prediction held against what it was made for, and is it left out, with the reason, where it
cannot be made?"""

from __future__ import annotations

import dataclasses
import gc
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("transformers")

from tiermem.swap.disk.queue import Event
from tiermem.tools.job.launcher import Job, give_back_free_memory, resident_of
from tiermem.tools.plan.prediction import (
    maths_of,
    measure,
    measure_host_memory,
    measure_kernels,
    measure_maths,
    measure_sums,
    time_plain_copies,
    warn_of_disk,
)
from tiermem.tools.presets import preset
from tiermem.tools.record.reports import predicted_table

TINY = preset("151m") | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 101,
}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4}


def job(shape: dict[str, Any]) -> Job:
    return Job("tiny", shape, None, {}, [], 1, 16, 1, 0, "bf16", False, None, None, [], None)


def test_plain_copies_are_timed_wherever_the_maths_runs() -> None:
    compute = time_plain_copies(job(TINY))
    assert compute.forward_s > 0 and compute.backward_s > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize("is_checkpointing", [False, True])
def test_a_copy_is_timed_block_by_block_and_for_the_rest(
    is_on_disk: bool, is_checkpointing: bool, tmp_path: Path
) -> None:
    folders = [str(tmp_path)] if is_on_disk else []
    maths = measure_maths(
        dataclasses.replace(job(TINY), is_checkpointing=is_checkpointing, nvme_paths=folders)
    )
    compute = maths.compute
    assert compute.forward_s > 0 and compute.backward_s > 0 and maths.use_s > 0
    assert compute.rest_forward_s is not None and compute.rest_forward_s >= 0
    assert maths.gradient_bytes_s is not None and maths.gradient_bytes_s > 0
    half = maths.shared_by(2)
    assert half.compute.forward_s == 2 * compute.forward_s
    assert half.gradient_bytes_s == maths.gradient_bytes_s / 2
    assert not list(tmp_path.iterdir())


def test_kernels_and_checksums_have_a_rate() -> None:
    assert measure_kernels(room_bytes=1 << 20) > 0
    assert measure_host_memory(room_bytes=1 << 20) is None  # without an accelerator
    assert measure_sums() > 0


@pytest.mark.slow
def test_what_was_measured_leaves_no_memory_behind() -> None:
    wide = dataclasses.replace(
        job(TINY | {"vocab_size": 1 << 15, "hidden_size": 256}), precision="fp32"
    )
    measure(wide, None, None)  # imports, threads
    give_back_free_memory()
    before = resident_of().now_bytes
    gc.disable()  # the collector runs when it wants to
    try:
        assert not isinstance(measure(wide, None, None), str)
        give_back_free_memory()
    finally:
        gc.enable()
    assert resident_of().now_bytes - before < 32 << 20  # the copy's weights take 64 MiB


MS = 1_000_000


def events_of(*spans: tuple[str, str, int, int]) -> list[Event]:
    return [Event(lane, name, start * MS, end * MS, 500) for lane, name, start, end in spans]


def test_a_pass_is_taken_apart_to_the_millisecond() -> None:
    events = events_of(
        ("wait", "param/1/layers.0", 2, 5),
        ("unit", "forward layers.0", 6, 16),
        ("wait", "param/2/layers.1", 17, 20),
        ("unit", "forward layers.1", 20, 30),
        ("unit", "forward head", 31, 35),
        ("unit", "backward head", 101, 105),
        ("reduce", "head", 105, 107),
        ("unit", "backward layers.1", 108, 128),
        ("reduce", "layers.1", 128, 133),
        ("unit", "backward layers.0", 134, 154),
        ("wait", "grad layers.1", 155, 158),
        ("reduce", "layers.0", 154, 162),  # five of its own
    )
    maths = maths_of(events, [((0, 40 * MS), (100 * MS, 165 * MS))], ("layers.",), 1000)
    compute = maths.compute
    assert compute.forward_s * 1000 == pytest.approx(0.020)
    assert compute.backward_s * 1000 == pytest.approx(0.040)
    assert maths.use_s == pytest.approx(0.001)  # 16 to 17, and 133 to 134
    assert compute.rest_forward_s == pytest.approx(0.040 - 0.020 - 0.006 - 3 * 0.001)
    assert compute.rest_backward_s == pytest.approx(0.065 - 0.040 - 0.015 - 3 * 0.001)
    assert maths.gradient_bytes_s == pytest.approx(2 * 2 * 500 / 0.010)


def test_what_is_recomputed_counts_once() -> None:
    events = events_of(
        ("unit", "forward layers.0", 0, 10),
        ("unit", "forward layers.0", 22, 32),
        ("unit", "backward layers.0", 20, 50),  # around its second forward
    )
    maths = maths_of(events, [((0, 10 * MS), (20 * MS, 50 * MS))], ("layers.",), 1)
    assert maths.compute.backward_s == pytest.approx(0.030)
    assert maths.gradient_bytes_s is None


def test_no_copy_is_made_where_the_cap_leaves_no_room() -> None:
    assert measure(job(TINY), 1000, None).startswith("a small copy of the model takes ")  # type: ignore[union-attr]


def test_a_model_whose_layers_cannot_be_counted_is_not_predicted() -> None:
    shape = {key: value for key, value in TINY.items() if key != "num_hidden_layers"}
    assert "num_hidden_layers" in str(measure(job(shape), None, None))


def test_predicted_and_real_stand_side_by_side() -> None:
    said = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "step_s": 3.0,
        "nvme_read_bytes": 11 << 20,
        "nvme_written_bytes": 0,
    }
    said |= {"disk_bytes": 0, "host_bytes": 9 << 20, "peak_bytes": 95 << 20}
    run = {
        "losses": [1.0],
        "predicted": said,
        "forward_s": [1.25],
        "backward_s": [2.0],
        "step_s": [2.75],
    }
    run |= {
        "nvme_read_bytes_a_step": 11 << 20,
        "nvme_written_bytes_a_step": 0,
        "nvme_peak_bytes": 0,
    }
    run |= {"host_peak_bytes": 9 << 20, "peak_rss_bytes": 100 << 20}
    table = predicted_table(run)
    assert table is not None
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.getvalue().splitlines()[2:]]
    rows = {name: values for name, *values in cells}
    assert rows["forward"] == ["1.000", "1.250", "0.800"]
    assert rows["together"] == ["6.000", "6.000", "1.000"]
    assert rows["resident at the peak"][-1] == "0.950"
    assert "states on NVMe" not in rows


@pytest.mark.parametrize(
    "change", [{"predicted": None}, {"predicted": {"not_made": "no room"}}, {"losses": []}]
)
def test_nothing_is_compared_without_a_prediction_or_a_step(change: dict[str, Any]) -> None:
    said = {
        "losses": [1.0],
        "predicted": {"forward_s": 1.0},
        "forward_s": [1.0],
        "backward_s": [1.0],
        "step_s": [1.0],
    }
    assert predicted_table(said | change) is None


def test_far_slower_products_are_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiermem.tools.job.train_job import make_config
    from tiermem.tools.options import TrainOptions
    from tiermem.tools.plan.prediction import settle_compute, warn_of_compute
    from tiermem.tools.presets import preset
    from tiermem.units import compute

    def config(precision: str) -> dict[str, Any]:
        return make_config(TrainOptions(offload="cpu", precision=precision))

    shape = preset("151m")
    monkeypatch.setattr(
        compute, "measure_products", lambda shapes, dtype: compute.Products(dtype, 1e9, 60e9)
    )
    said = warn_of_compute(config("bf16"), shape)
    assert (
        said is not None
        and "bf16 products are 60 times slower" in said
        and "give --precision auto" in said
    )
    assert warn_of_compute(config("fp32"), shape) is None
    settled, choice = settle_compute(config("auto"), shape)
    assert settled["tiermem"]["compute_dtype"] == choice.dtype == "fp32"
    assert warn_of_compute(settled, shape) is None
    monkeypatch.setattr(
        compute, "measure_products", lambda shapes, dtype: compute.Products(dtype, 60e9, 60e9)
    )
    assert settle_compute(config("auto"), shape)[0]["tiermem"]["compute_dtype"] == "storage"
    assert warn_of_compute(config("bf16"), shape) is None


def test_a_far_slower_disk_is_told_before_the_start() -> None:
    limits_s = {"compute": 0.1, "disk": 30.0, "link": 0.0, "kernels": 0.2}
    said = warn_of_disk({"limits_s": limits_s})
    assert said is not None and "30 s of each step, 150 times" in said and "--offload auto" in said
    assert warn_of_disk({"limits_s": {**limits_s, "disk": 3.0}}) is None
    assert warn_of_disk({"not_made": "the disk was not measured"}) is None
