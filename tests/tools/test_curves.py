"""Do the curves compare what they say, and does training in lower precisions end where the exact
one does?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import curves
from bench.curves import bench_curves, rows_of, train_curve
from bench.options import CurvesOptions
from rich.console import Console

from tiermem.precision import PRESETS
from tiermem.tools.corpus import Corpus
from tiermem.tools.options import STATES

pytestmark = pytest.mark.usefixtures("opened_fonts")


def text(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_text(
        "".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(3000))
    )
    return file


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "_BATCH", 2)
    monkeypatch.setattr(curves, "_SEQ", 32)


@pytest.mark.slow
@pytest.mark.usefixtures("few_tokens")
def test_the_figures_hold_a_curve_of_each_preset(tmp_path: Path) -> None:
    files = tmp_path / "curves.json", tmp_path / "curves.png"
    outputs = {"json_file": files[0], "plot_file": files[1]}
    options = CurvesOptions(4, ("exact", "tiny"), [text(tmp_path)], 5, 2, **outputs)
    assert bench_curves(options, Console(quiet=True)) == 0
    figures = json.loads(files[0].read_text())
    assert [row["preset"] for row in figures["rows"]] == ["exact", "tiny"]
    exact, tiny = figures["rows"]
    assert (tiny["master"], tiny["moments"], tiny["rounding"]) == ("split", "8bit", "stochastic")
    assert len(exact["losses"]) == len(tiny["losses"]) == 4
    assert figures["seeds"] == [5, 6]
    for seed in range(2):
        # the same weights and data
        assert exact["losses_by_seed"][seed][0] == tiny["losses_by_seed"][seed][0]
        assert exact["losses_by_seed"][seed] != tiny["losses_by_seed"][seed]
    assert exact["losses_by_seed"][0] != exact["losses_by_seed"][1]
    assert exact["against_first"] == exact["standard_error"] == 0.0
    assert files[1].read_bytes().startswith(b"\x89PNG")
    again = CurvesOptions(1, ("exact",), [text(tmp_path)], 5, 1, **outputs)
    assert bench_curves(again, Console(quiet=True)) == 0  # its own files are overwritten
    assert [row["losses_by_seed"] for row in json.loads(files[0].read_text())["rows"]] == [
        [[exact["losses_by_seed"][0][0]]]
    ]


@pytest.mark.usefixtures("few_tokens")
def test_a_curve_is_the_same_again(tmp_path: Path) -> None:
    corpus = Corpus([text(tmp_path)], 32, 0)
    assert train_curve("compact", corpus, 3, 0) == train_curve("compact", corpus, 3, 0)


def test_the_final_loss_is_the_mean_of_the_last_tenth_and_compared_seed_by_seed() -> None:
    start = [9.0] * 18
    rows = rows_of(
        {
            "exact": [[*start, 2.0, 4.0], [*start, 2.0, 2.0]],
            "tiny": [[*start, 3.0, 3.3], [*start, 2.0, 2.2]],
        }
    )
    assert [row["final_loss"] for row in rows] == [2.5, pytest.approx(2.625)]
    assert rows[1]["against_first_by_seed"] == [pytest.approx(0.05), pytest.approx(0.05)]
    assert rows[1]["against_first"] == pytest.approx(0.05)
    assert rows[1]["standard_error"] == pytest.approx(0.0, abs=1e-12)
    assert rows[1]["losses"] == [9.0] * 18 + [2.5, pytest.approx(2.75)]


@pytest.mark.parametrize("presets", [("exakt",), (), ("exact", "exact")])
def test_presets_are_known_and_given_once(presets: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"--presets is .*exact, compact, bf16, tiny"):
        CurvesOptions(presets=presets)


def test_there_is_at_least_one_step_and_one_seed() -> None:
    with pytest.raises(ValueError, match="--steps is 0"):
        CurvesOptions(steps=0)
    with pytest.raises(ValueError, match="--repeats is 0"):
        CurvesOptions(repeats=0)


def test_somebody_elses_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(FileExistsError, match="not made by"):
        bench_curves(CurvesOptions(json_file=tmp_path / "mine.json"), Console(quiet=True))


def test_train_knows_the_same_presets() -> None:
    assert set(STATES) == set(PRESETS)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # nine trainings, with one thread each in `make test-all`
def test_lower_precisions_end_where_exact_does() -> None:
    """300 steps on the demo's data: compact within 0.5 % of the exact final loss, tiny within 1.5
    %."""
    presets = ("exact", "compact", "tiny")
    rows = rows_of(
        {
            name: [train_curve(name, Corpus([], 128, s), 300, s) for s in range(3)]
            for name in presets
        }
    )
    assert rows[0]["final_loss"] < 0.5 * rows[0]["losses"][0]
    assert abs(rows[1]["against_first"]) < 0.005
    assert abs(rows[2]["against_first"]) < 0.015
