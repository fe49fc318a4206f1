"""Do the DeepSpeed configs that fine-tuning projects publish load, and train a tiny model as the
plain Trainer does?"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from published_configs import CONFIGS
from trainings import Log, TiermemTrainer, Trainer, train

ASKED = {"max_steps": 4, "warmup_steps": 2, "save_strategy": "no"}


@functools.lru_cache
def plain(folder: Path) -> Log:
    return train(Trainer, "llama", folder, **ASKED)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_trains(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = CONFIGS[name]
    is_bf16 = config.get("bf16", {}).get("enabled") is True
    clipping = {} if "gradient_clipping" in config else {"max_grad_norm": 0.0}
    found = train(
        TiermemTrainer, "llama", tmp_path, tiermem=config, bf16=is_bf16, **ASKED, **clipping
    )
    expected = plain(tmp_path_factory.getbasetemp() / "plain")
    assert found.losses[:1] == pytest.approx(expected.losses[:1], rel=1e-2 if is_bf16 else 1e-6)
    if "scheduler" not in config and not clipping:
        assert found.losses == pytest.approx(expected.losses, rel=1e-2 if is_bf16 else 1e-6)
        assert found.rates == expected.rates
