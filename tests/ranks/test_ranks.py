"""Do two ranks train as a DistributedDataParallel twin does, wherever things rest?

One launch of torchrun runs every case (train_on_ranks.py); the tests look at what it wrote.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, DTYPES

HERE = Path(__file__).parent
RANKS = 2


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*command, str(HERE / "train_on_ranks.py"), str(out), str(nvme)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)], nvme


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_the_twin(case: str, dtype: str, accumulation: int, launched: Any) -> None:
    for rank in range(RANKS):
        found = launched[0][rank][f"{case} {dtype} x{accumulation}"]
        if accumulation == 1:  # sums of two numbers round the same in any order
            assert found["losses"] == found["twin"]
            assert found["head"] == found["twin_head"]
        else:  # the twin adds micro-batches before ranks, we add ranks before micro-batches
            rounding = 1e-5 if dtype == "float32" else 1e-2
            assert found["losses"] == pytest.approx(found["twin"], rel=rounding)
        assert found["norms"] == pytest.approx(found["twin_norms"], rel=1e-5 if dtype == "float32" else 1e-2)
        assert found["same_weights"]
        assert (found["read_bytes"] > 0) == ("nvme" in case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_tiers_change_no_bit_on_ranks(stage: int, dtype: str, accumulation: int, launched: Any) -> None:
    same = [case for case in CASES if f"stage {stage}" in case]
    for rank in range(RANKS):
        results = [launched[0][rank][f"{case} {dtype} x{accumulation}"] for case in same]
        for each in results:
            assert (each["losses"], each["norms"], each["head"]) == tuple(
                results[0][k] for k in ("losses", "norms", "head")
            )


def test_nothing_is_left_in_the_nvme_folder(launched: Any) -> None:
    assert not list(launched[1].iterdir())
