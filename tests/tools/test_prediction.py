"""Is a prediction held against what it was made for, and is it left out, with the reason, where it cannot be made?"""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("transformers")

from tiermem.tools.calibrate import measure_compute, measure_kernels
from tiermem.tools.job import Job
from tiermem.tools.prediction import measure_maths
from tiermem.tools.presets import preset
from tiermem.tools.reports import predicted_table

TINY = preset("151m") | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 4}


def job(shape: dict[str, Any]) -> Job:
    return Job("tiny", shape, None, {}, [], 1, 16, 1, 0, 1e-3, "bf16", False, None, None, [], None)


def test_a_copy_is_timed_block_by_block_and_for_the_rest() -> None:
    compute = measure_compute(TINY, "fp32", 2, 16, False)
    assert compute.forward_s > 0 and compute.backward_s > 0
    assert compute.rest_forward_s is not None and compute.rest_forward_s >= 0
    assert measure_kernels(1 << 16) > 0
    half = compute.shared_by(2)
    assert half.forward_s == 2 * compute.forward_s


def test_no_copy_is_made_where_the_cap_leaves_no_room() -> None:
    assert measure_maths(job(TINY), 1000).startswith("two small copies of the model take ")  # type: ignore[union-attr]


def test_a_model_whose_layers_cannot_be_counted_is_not_predicted() -> None:
    shape = {key: value for key, value in TINY.items() if key != "num_hidden_layers"}
    assert "num_hidden_layers" in str(measure_maths(job(shape), None))


def test_predicted_and_real_stand_side_by_side() -> None:
    said = {"forward_s": 1.0, "backward_s": 2.0, "step_s": 3.0, "nvme_read_bytes": 11 << 20, "nvme_written_bytes": 0}
    said |= {"disk_bytes": 0, "host_bytes": 9 << 20, "peak_bytes": 95 << 20}
    run = {"losses": [1.0], "predicted": said, "forward_s": [1.25], "backward_s": [2.0], "step_s": [2.75]}
    run |= {"nvme_read_bytes_a_step": 11 << 20, "nvme_written_bytes_a_step": 0, "nvme_peak_bytes": 0}
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


@pytest.mark.parametrize("change", [{"predicted": None}, {"predicted": {"not_made": "no room"}}, {"losses": []}])
def test_nothing_is_compared_without_a_prediction_or_a_step(change: dict[str, Any]) -> None:
    said = {"losses": [1.0], "predicted": {"forward_s": 1.0}, "forward_s": [1.0], "backward_s": [1.0], "step_s": [1.0]}
    assert predicted_table(said | change) is None
