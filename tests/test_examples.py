"""Do the examples and the first page run as they are, from the installed wheel, on the simulated
device, in little time?"""

from __future__ import annotations

import ast
import importlib.util
import re
import time
from pathlib import Path

import fork_server
import pytest
from installed import python, run, wheel
from on_simulated import python as on_simulated

__all__ = ["python", "wheel"]

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
SAID = {
    "accelerate_loop": "micro-batch 16: loss",
    "deepspeed_json": "micro-batch 16: loss",
    "disk_benchmark": "queue_depth",
    "lightning_strategy": "step 30: loss",
    "lora": "trainable params",
    "moe_layer": "decode step",
    "nvme_inference": "NVME",
    "plain_loop": "step 20: loss",
    "trainer": "train_loss",
    "trl_sft": "train_loss",
}
"""A part of what each prints."""
PACKAGES = {
    "accelerate_loop": ("accelerate", "transformers"),
    "lightning_strategy": ("lightning", "tiermem.integrations.lightning"),
    "lora": ("peft", "transformers"),
    "moe_layer": ("transformers",),
    "nvme_inference": ("transformers",),
    "trainer": ("transformers",),
    "trl_sft": ("trl", "transformers"),
}


def named(*names: str) -> list[Path]:
    return [file for file in EXAMPLES if file.stem in names]


def needs(example: Path) -> None:
    """Skips a test of an example whose packages are not installed."""
    packages = PACKAGES.get(example.stem, ())
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"there is no {package}")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_example_is_short_and_says_what_it_is(example: Path) -> None:
    source = example.read_text("utf-8")
    said = ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) < 70
    assert said and f"python {example.name}" in said
    assert example.stem in SAID
    # What is tiny would stay in memory otherwise, and nothing would be read from NVMe.
    assert "params=Tier.NVME" not in source or "persistence_numel=" in source


@pytest.mark.sampled(16)
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_example_runs(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(example)
    monkeypatch.chdir(tmp_path)
    done = fork_server.run([str(example)], 120.0, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAID[example.stem] in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_example_runs_from_the_installed_wheel(example: Path, python: Path, tmp_path: Path) -> None:
    needs(example)
    said = run(python, tmp_path, str(example))
    assert SAID[example.stem] in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    named("plain_loop", "deepspeed_json", "nvme_inference", "trainer"),
    ids=lambda file: file.stem,
)
def test_example_runs_on_the_simulated_device(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(example)
    monkeypatch.chdir(tmp_path)
    assert SAID[example.stem] in on_simulated(str(example), TIERMEM_SIM_SCHEDULE="late")


@pytest.mark.slow
def test_a_newcomer_fine_tunes_by_copying_the_first_page(python: Path, tmp_path: Path) -> None:
    """From the installed wheel; installing torch and transformers is the network's time."""
    begin = time.monotonic()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    for number, block in enumerate(blocks):
        (tmp_path / f"copied{number}.py").write_text(block)
        run(python, tmp_path, f"copied{number}.py")
    assert (tmp_path / "out" / "final" / "model.safetensors").is_file()
    assert len(blocks) == 2
    assert time.monotonic() - begin < 300
