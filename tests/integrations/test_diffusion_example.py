"""Does the example train a tiny Flux whole, full and LoRA, and does diffusers draw a picture with
what it saved?"""

from __future__ import annotations

import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch

diffusers: Any = pytest.importorskip("diffusers", reason="pip install diffusers")

DOCS = Path(__file__).parents[2] / "docs"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads that stay
EXAMPLES = DOCS / "examples" / "flux"
PAGE = DOCS / "diffusion.md"
WORDS = ["--rate", "1e-3", "--gpu-gib", "1", "--ram-gib", "0.25", "--sample-every", "3"]
WORDS += ["--ema", "0.99"]


def run(name: str, folder: Path, *words: str) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        script = [str(EXAMPLES / name), *words]
        done = fork_server.run(script, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in this process, which has imported diffusers."""
    folder = tmp_path_factory.mktemp("flux")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        runpy.run_path(str(EXAMPLES / "tiny_parts.py"), run_name="__main__")
    return folder


def drawn(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    found: torch.Tensor = pipeline(
        "a red square",
        height=64,
        width=64,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images[0]
    return found


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["full", "lora"])
def test_the_example_trains_and_diffusers_draws_with_it(way: str, parts: Path) -> None:
    if way == "lora":
        pytest.importorskip("peft", reason="LoRA needs peft: make .venv/.trl")
    out = parts / way
    said = run("train.py", parts, "--out", way, *WORDS, *["--lora", "4"] * (way == "lora"))
    assert said.count("loss") == 6 and "step 6: loss" in said
    assert {file.name for file in out.glob("sample-*")} == {"sample-3.png", "sample-6.png"}
    assert sorted(file.name for file in parts.iterdir() if file.name.startswith("tiermem-")) == []
    plain = diffusers.FluxPipeline.from_pretrained(parts / "tiny-flux")
    before = drawn(plain)
    if way == "lora":
        plain.load_lora_weights(out)
        trained = plain
    else:
        opened = diffusers.FluxTransformer2DModel.from_pretrained(out / "transformer")
        trained = diffusers.FluxPipeline.from_pretrained(parts / "tiny-flux", transformer=opened)
    after = drawn(trained)
    assert after.shape == before.shape == (3, 64, 64)
    assert bool(after.isfinite().all())
    assert not torch.equal(after, before)
    shutil.rmtree(out)


@pytest.mark.slow
def test_the_example_goes_on_from_a_saved_step(parts: Path) -> None:
    words = ["--out", "stopped", *WORDS, "--save-every", "2"]
    run("train.py", parts, *words, "--steps", "2")
    said = run("train.py", parts, *words, "--steps", "4", "--resume")
    assert said.count("loss") == 2 and "step 3: loss" in said and "step 4: loss" in said
    for each in (parts / "stopped", *parts.glob("tiermem-*")):
        shutil.rmtree(each)


def test_the_page_shows_a_program_that_runs(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, block = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(parts)
    exec(compile(block, "diffusion.md", "exec"), {})  # the page's own program
    diffusers.FluxTransformer2DModel.from_pretrained(parts / "trained")
