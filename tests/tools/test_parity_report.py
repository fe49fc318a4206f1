"""Does the parity report find equal bits, tell different ones, and write what programs counted?"""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import parity
from bench.parity import Harm, Way

from tiermem import Tier

FACTS = {"memory_bytes": 1 << 34, "virtualisation": "none", "cpu": "a processor", "num_cores": 2, "kernel": "Linux",
         "tiermem": "0", "date": "2026-01-02T03:04:05", "paths": [], "python": "3"}  # fmt: skip


def test_tiers_have_one_digest_and_precisions_another(tmp_path: Path) -> None:
    memory, nvme = (
        Way(home.name, {"params": home, "optim": home}) for home in (Tier.HOST, Tier.NVME)
    )
    first = parity.digest_of(memory, "bf16, compact", tmp_path)
    assert parity.digest_of(nvme, "bf16, compact", tmp_path) == first
    assert parity.digest_of(memory, "bf16, tiny", tmp_path) != first


def test_every_way_rests_somewhere_else() -> None:
    names = [way.name for way in parity.ways()]
    assert len(set(names)) == len(names) > 9
    assert any("engine threads" in name for name in names)


def test_a_difference_on_any_rank_is_told() -> None:
    bits = {2: {"fp32": {"memory": ["aa", "bb"], "disk": ["aa", "bc"], "tiles": ["aa", "bb"]}}}
    assert parity.differing(bits[2]) == ["fp32: disk"]
    page = parity.report(FACTS, "abc", "make report", bits, {})
    assert "2 ranks: 2 of 3 trainings equal" in page
    assert "| disk | `aa` **differs** |" in page and "| tiles | `aa` |" in page
    del bits[2]["fp32"]["disk"]
    page = parity.report(FACTS, "abc", "make report", bits, {})
    assert "2 ranks: 2 of 2 trainings equal" in page
    assert "In each precision (fp32 `aa`) these ways have the same bits: memory; tiles." in page


def test_counts_of_cases_are_those_of_the_programs() -> None:
    killed, failing = Harm("killed", "deaths.py", ()), Harm("failing", "nth.py", ())
    counted = {"cases": {"fresh": 7, "left": 3}, "failed": 1, "seed": 4, "seconds": 5}
    page = parity.report(
        FACTS, "abc", "make report", {}, {killed: counted, failing: {"not_run": "no ptrace"}}
    )
    assert "| killed (`deaths.py`) | 10 | 1 | 4 | 5 |" in page
    assert "not run: no ptrace" in page


@pytest.mark.slow
def test_a_report_of_this_machine_has_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parity.main(["--out", "parity.md", "--cases", "0"]) == 0
    page = (tmp_path / "parity.md").read_text()
    assert "### 1 rank: " in page and "### 2 ranks: " in page and "differs" not in page
