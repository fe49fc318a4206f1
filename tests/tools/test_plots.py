"""Are the pictures drawn from a run's files, and do they show what the run was?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_run import DEVICE_FIELDS, MS, write_run

pytest.importorskip("matplotlib")

from tiermem.tools.record import plots
from tiermem.tools.record.run_record import PHASES, Span, read_spans

pytestmark = pytest.mark.usefixtures("opened_fonts")


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    from matplotlib import pyplot

    yield
    pyplot.close("all")


@pytest.mark.slow
def test_three_pictures_are_drawn_by_a_process_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tiermem.tools.record.plots", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.splitlines()]
    assert [file.name for file in files] == ["loss.png", "memory.png", "timeline.png"]
    for file in files:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) > 10_000


def test_a_run_that_died_before_its_first_step_shows_its_memory_alone(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=0)
    assert [file.name for file in plots.draw_run(tmp_path)] == ["memory.png"]


def test_axes_are_labelled_with_units_and_the_cap_is_drawn(tmp_path: Path) -> None:
    figure = plots.draw_memory(write_run(tmp_path))
    assert figure is not None
    top, bottom = figure.axes
    assert top.get_ylabel() == "memory (MiB)"
    assert bottom.get_xlabel() == "time (s)"
    assert "cap 1250 MiB (cgroup-v1)" in [text.get_text() for text in top.texts]


def test_an_accelerators_memory_has_lines_of_its_own(tmp_path: Path) -> None:
    figure = plots.draw_memory(write_run(tmp_path, device_fields=DEVICE_FIELDS))
    assert figure is not None
    _, device, _ = figure.axes
    assert device.get_ylabel() == "cuda:0 (MiB\nof 20,480)"
    legend = device.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "in tensors", "reserved by torch", "most in tensors so far",
    ]  # fmt: skip
    assert "cuda:0 200 MiB" in figure.get_suptitle()


def test_the_timeline_is_of_one_step_and_says_what_was_moved(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    figure = plots.draw_timeline(run, read_spans(tmp_path / "events.jsonl"))
    assert figure is not None
    (ax,) = figure.axes
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert [label.split("\n")[0] for label in labels] == [
        "phase",
        "disk reads",
        "disk writes",
        "kernels",
        "wait",
    ]
    assert "0.13 GB at 1.3 GB/s" in labels[1]
    assert ax.get_xlim() == (0.0, 300.0)


def test_a_step_under_the_next_forward_is_drawn_beside_it_with_every_lane(tmp_path: Path) -> None:
    """Each step returns after 20 of its 150 ms; its tiles go on under the forward, a module of
    which waits for 10 of 60 ms."""
    run, spans = write_run(tmp_path), []
    for span in read_spans(tmp_path / "events.jsonl"):
        if span.lane == "wait":
            continue  # nothing waits for a tile
        late = 0 if span.lane in PHASES else 150 * MS
        end_ns = span.start_ns + 20 * MS if span.lane == "step" else span.end_ns + late
        spans.append(span._replace(start_ns=span.start_ns + late, end_ns=end_ns))
        if span.lane == "forward":
            spans.append(Span("unit", "forward layers.0", span.start_ns, span.end_ns, 0))
            spans.append(
                Span("wait", "step of layers.0", span.start_ns + 5 * MS, span.start_ns + 15 * MS, 0)
            )
            spans.append(Span("gather", "layers.0", span.start_ns, span.start_ns + 4 * MS, 0))
    figure = plots.draw_timeline(run, sorted(spans, key=lambda span: span.start_ns))
    assert figure is not None
    (ax,) = figure.axes
    labels = [label.get_text().split(" busy")[0] for label in ax.get_yticklabels()]
    assert labels[:3] == ["phase", "maths\n17%", "link\n1%"]
    assert [label.split("\n")[0] for label in labels[3:]] == [
        "disk reads",
        "disk writes",
        "kernels",
        "wait",
    ]
    texts = [text.get_text() for text in ax.texts]
    assert [text for text in texts if "under" in text] == [
        f"step under the forward\n{ms} ms" for ms in (138, 130)
    ]
    assert figure.get_suptitle().endswith(
        "two or more of maths, link, disk and kernels at once: 17%"
    )


def test_a_step_whose_events_were_forgotten_is_not_chosen(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    spans = [span for span in read_spans(tmp_path / "events.jsonl") if span.start_ns >= 1600 * MS]
    step = plots._typical_step(run["pictures"]["steps"], spans)
    assert step is not None
    assert step["step"] == 3
