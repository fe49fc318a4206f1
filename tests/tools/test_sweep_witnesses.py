"""Are fio and the yardsticks asked for the same as ours, and left out once they fail?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sweep_values import MIB, setting

pytest.importorskip("_tiermem_native")

from tiermem.tools.bench.witnesses import FioWitness, LoopWitness, bare_witness
from tiermem.tools.measure.files import BenchFiles

Program = Callable[[str], Path]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BenchFiles]:
    with BenchFiles([tmp_path], [8 * MIB]) as opened:
        if not opened.is_direct([0]):
            pytest.skip("no O_DIRECT below the temporary folder")
        yield opened


@pytest.fixture
def make_program(tmp_path: Path) -> Program:
    """A yardstick that notes its commands and answers with the given expression of `words`."""

    def make(answer: str) -> Path:
        program = tmp_path / "loop"
        program.write_text(
            f"#!{sys.executable}\nimport sys\nfor line in sys.stdin:\n    words = line.split()\n"
            f"    open({str(tmp_path / 'log')!r}, 'a').write(line)\n"
            f"    if words == ['quit']: break\n    print({answer}, flush=True)\n"
        )
        program.chmod(0o755)
        return program

    return make


def test_a_yardstick_moves_what_ours_moves(
    make_program: Program, files: BenchFiles, tmp_path: Path
) -> None:
    with bare_witness(make_program("'0.001 0.002 0'"), files, sync=False) as witness:
        for mode, num_bytes in (("read", 8 * MIB), ("mixed", 4 * MIB), ("random", MIB)):
            witness.measure(setting(mode), num_bytes, loop=3)
        assert witness.loops_gbps(setting("read")) == [pytest.approx(8 * MIB / 1e6)]
        assert witness.loops_gbps(setting("mixed")) == [pytest.approx(8 * MIB / 1e6)]
        assert witness.loops_gbps(setting("write")) == []
        assert witness.user_us(setting("random")) == pytest.approx(2000)
        assert witness.loops_gbps(setting("read", depth=9)) == []
    sizes = (MIB, 8 * MIB, 4 * MIB)
    assert (tmp_path / "log").read_text().splitlines() == [
        f"read {sizes[0]} 8 {sizes[1]}",
        f"mixed {sizes[0]} 4 {sizes[2]} {sizes[2]}",  # its depth is each way
        f"random {sizes[0]} 8 {sizes[0]} 3",
        "quit",
    ]


def test_a_mixed_pass_of_one_block_has_no_counterpart(
    make_program: Program, files: BenchFiles
) -> None:
    with bare_witness(make_program("'1 1 1'"), files, sync=False) as witness:
        witness.measure(setting("mixed", depth=1), MIB, loop=0)
        assert witness.loops_gbps(setting("mixed", depth=1)) == []
        assert witness.notes == []


def test_there_is_a_rate_of_each_loop(make_program: Program, files: BenchFiles) -> None:
    with LoopWitness(
        "one", make_program("int(words[3]) / 1e9, 0, 0"), files, ["random"], sync=False
    ) as witness:
        for loop in range(2):
            witness.measure(setting("random"), 4096, loop)
        assert witness.loops_gbps(setting("random")) == [pytest.approx(1.0)] * 2


def test_without_a_sync_of_theirs_a_synced_write_is_not_compared(
    make_program: Program, files: BenchFiles
) -> None:
    with bare_witness(make_program("'1 1 1'"), files, sync=True) as witness:
        for mode in ("write", "mixed", "read"):
            witness.measure(setting(mode), MIB, loop=0)
        assert witness.loops_gbps(setting("write")) == []
        assert witness.loops_gbps(setting("mixed")) == []
        assert len(witness.loops_gbps(setting("read"))) == 1
        assert witness.notes == [
            "the yardstick does not sync: with --fsync it stands beside reads alone"
        ]


def test_one_that_fails_says_so_once_and_is_left_out(
    make_program: Program, files: BenchFiles, tmp_path: Path
) -> None:
    with bare_witness(make_program("'error no such ring'"), files, sync=False) as witness:
        for loop in range(3):
            witness.measure(setting(), MIB, loop)
        assert witness.loops_gbps(setting()) == []
        assert len(witness.notes) == 1
        assert "error no such ring" in witness.notes[0]
    assert (tmp_path / "log").read_text().splitlines() == [f"read {MIB} 8 {MIB}", "quit"]


def test_the_better_engine_of_fio_counts(tmp_path: Path, files: BenchFiles) -> None:
    program = tmp_path / "fio"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *libaio*) time=500;; *) time=1000;; esac\n'
        'way="{\\"io_bytes\\": 1000000000, \\"runtime\\": $time}"\n'
        'echo "{\\"jobs\\": [{\\"error\\": 0, \\"read\\": $way, \\"write\\": {\\"io_bytes\\": 0, '
        '\\"runtime\\": 0}}]}"\n'
    )
    program.chmod(0o755)
    witness = FioWitness(str(program), files, sync=False)
    witness.measure(setting(), 8 * MIB, 0)
    assert witness.loops_gbps(setting()) == [pytest.approx(2.0)]
    assert witness.loops_gbps(setting("write")) == []


def test_an_engine_of_fio_that_fails_is_left_out(tmp_path: Path, files: BenchFiles) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho 'not loadable' >&2\nexit 1\n")
    program.chmod(0o755)
    witness = FioWitness(str(program), files, sync=False)
    for loop in range(2):
        witness.measure(setting(), 8 * MIB, loop)
    assert witness.loops_gbps(setting()) == []
    assert len(witness.notes) == 2
