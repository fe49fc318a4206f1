"""Is fio's report read right, and its failure told in its own words?"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from sweep_values import setting

from tiermem.tools.bench.witnesses import ENGINES, read_rate, run_fio
from tiermem.tools.measure.files import BenchFiles


def report(read: tuple[int, int], write: tuple[int, int], error: int = 0) -> str:
    ways = {
        name: {"io_bytes": way[0], "runtime": way[1]}
        for name, way in (("read", read), ("write", write))
    }
    return json.dumps({"fio version": "fio-3.33", "jobs": [{"error": error, **ways}]})


def test_a_rate_is_bytes_over_milliseconds() -> None:
    assert read_rate(report((2_000_000_000, 500), (0, 0))) == pytest.approx(4.0)


def test_both_directions_count_over_the_longer_time() -> None:
    assert read_rate(report((1_000_000_000, 400), (1_000_000_000, 500))) == pytest.approx(4.0)


def test_lines_before_the_report_are_passed_over() -> None:
    assert read_rate("fio: note: something\n" + report((10**9, 1000), (0, 0))) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "said",
    ["", "no report", "{}", '{"jobs": []}', report((0, 0), (0, 0)), report((9, 9), (0, 0), 5)],
)
def test_what_is_no_measurement_is_an_error(said: str) -> None:
    with pytest.raises(OSError, match="fio"):
        read_rate(said)


def test_a_failure_has_the_words_of_the_program(tmp_path: Path) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho 'fio: engine not loadable' >&2\nexit 1\n")
    program.chmod(0o755)
    with (
        BenchFiles([tmp_path], [4096]) as files,
        pytest.raises(OSError, match=r"io_uring.* failed: fio: engine not loadable"),
    ):
        run_fio(str(program), "io_uring", files, setting(block_bytes=4096, depth=1), 4096)


@pytest.mark.parametrize("mode", ["read", "write", "mixed", "random", "random-write"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_program_measures_a_file_without_a_name(tmp_path: Path, engine: str, mode: str) -> None:
    program = shutil.which("fio")
    if program is None:
        pytest.skip("fio is not installed")
    with BenchFiles([tmp_path], [1 << 22]) as files:
        try:
            rate = run_fio(
                program,
                engine,
                files,
                setting(mode, block_bytes=65536, depth=4),
                1 << 21,
                sync=True,
            )
        except OSError as error:
            pytest.skip(f"{engine}: {error}")
        assert rate > 0
        assert os.fstat(files.descriptor(0)).st_size == 1 << 22
    assert list(tmp_path.iterdir()) == []
