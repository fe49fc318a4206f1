"""Is the share of copies under kernels that of a made-up trace, to the microsecond? And what else
of a trace is kept?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("_tiermem_native")

from bench.gpu_trace import _is_kept, hidden_share, read_trace, split

from tiermem.tools.words import save_json

UP, DOWN, WITHIN = (
    "Memcpy HtoD (Pinned -> Device)",
    "Memcpy DtoH (Device -> Pinned)",
    "Memcpy DtoD (Device -> Device)",
)


def event(cat: str, name: str, start: float, end: float, **args: int) -> dict[str, Any]:
    """As torch's profiler writes it: microseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": end - start,
        "pid": 0,
        "tid": 7,
        "args": args,
    }


def kernel(start: float, end: float) -> dict[str, Any]:
    return event("kernel", "ampere_bf16_gemm", start, end, stream=7)


def copy(name: str, start: float, end: float, num_bytes: int = 0) -> dict[str, Any]:
    return event("gpu_memcpy", name, start, end, bytes=num_bytes)


MADE_UP = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    event("cpu_op", "aten::mm", 0, 500),
    event("cuda_runtime", "cudaLaunchKernel", 0, 5),
    kernel(100, 200),
    kernel(150, 300),  # on another stream: together they last from 100 to 300
    kernel(400, 500),
    copy(UP, 50, 150, 1000),  # 50 of 100 under kernels
    copy(UP, 250, 450, 3000),  # 50 + 50 of 200
    copy(UP, 420, 460, 500),  # at the same time as the one before: 10 more, all hidden
    copy(DOWN, 600, 700, 800),  # nothing runs
    copy(WITHIN, 100, 200, 9000),
    event("gpu_memset", "Memset (Device)", 300, 400),
    {"ph": "X", "cat": "kernel", "name": "without a time"},
]


def test_the_share_is_the_time_of_copies_in_which_a_kernel_runs() -> None:
    found = hidden_share(MADE_UP)
    assert found["kernel_s"] == pytest.approx(300e-6)
    up, down, both = found["to device"], found["to host"], found["both"]
    assert (up["num_copies"], up["num_bytes"]) == (3, 4500)
    assert up["copy_s"] == pytest.approx(310e-6) and up["hidden_s"] == pytest.approx(160e-6)
    assert up["share"] == pytest.approx(160 / 310) and up["most_share"] == pytest.approx(300 / 310)
    assert (down["num_copies"], down["share"], down["most_share"]) == (1, 0.0, 1.0)
    assert both["copy_s"] == pytest.approx(410e-6) and both["share"] == pytest.approx(160 / 410)


def test_copies_both_ways_at_once_count_once_and_none_is_no_share() -> None:
    both = hidden_share([kernel(0, 10), copy(UP, 0, 20), copy(DOWN, 10, 30)])["both"]
    assert both["copy_s"] == pytest.approx(30e-6) and both["share"] == pytest.approx(1 / 3)
    nothing = hidden_share([kernel(0, 10), copy(WITHIN, 0, 20)])
    assert [nothing[way]["share"] for way in ("to device", "to host", "both")] == [None, None, None]
    assert hidden_share([])["kernel_s"] == 0.0


@pytest.mark.parametrize(
    "up", ["Memcpy HtoD (Pageable -> Device)", "CopyHostToDevice", "hipMemcpyHtoD", "Memcpy M2D"]
)
def test_directions_are_read_from_the_names_of_every_vendor(up: str) -> None:
    down = up.replace("HtoD", "DtoH").replace("HostToDevice", "DeviceToHost").replace("M2D", "D2M")
    lanes = split([copy(up, 0, 1), copy(down, 2, 3)])
    assert lanes == {"kernels": [], "to device": [(0.0, 1.0)], "to host": [(2.0, 3.0)]}


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda each: (each[0], sum(each))),
    max_size=8,
)


@given(kernels=spans, copies=spans)
def test_the_share_equals_a_count_of_microseconds(
    kernels: list[tuple[int, int]], copies: list[tuple[int, int]]
) -> None:
    found = hidden_share(
        [*(kernel(*each) for each in kernels), *(copy(UP, *each) for each in copies)]
    )
    running = {tick for start, end in kernels for tick in range(start, end)}
    copying = {tick for start, end in copies for tick in range(start, end)}
    assert found["kernel_s"] == pytest.approx(len(running) * 1e-6)
    assert found["to device"]["copy_s"] == pytest.approx(len(copying) * 1e-6)
    assert found["to device"]["hidden_s"] == pytest.approx(len(running & copying) * 1e-6)


def test_what_the_device_and_its_driver_did_is_kept() -> None:
    kept = [each for each in MADE_UP if _is_kept(each)]
    assert [each.get("cat") for each in kept[:2]] == [None, "cuda_runtime"]
    assert not any(each.get("cat") == "cpu_op" for each in kept) and hidden_share(
        kept
    ) == hidden_share(MADE_UP)


def test_a_file_that_is_no_trace_is_refused_and_none_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "a.trace.json"
    assert read_trace(file) == []
    save_json(file, {"traceEvents": MADE_UP})
    assert read_trace(file) == MADE_UP
    save_json(file, [1])
    with pytest.raises(ValueError, match="is no Chrome trace"):
        read_trace(file)
