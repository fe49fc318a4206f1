"""Does Lightning's Trainer with TiermemStrategy train its own demo modules as on a single device,
and resume?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from launch import launch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_trainings import (
    MODULES,
    NUM_STEPS,
    Boring,
    built,
    fit,
    strategy_of,
    with_and_without_break,
)
from programs.twins import assert_same_tensors

from tiermem.integrations.lightning import TiermemStrategy

HERE = Path(__file__).parent


WORDS = ("whole", "first", "second")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one device trains without tiermem, with and without a break; and the folder of its
    checkpoints."""
    folder = tmp_path_factory.mktemp("plain")
    return {name: with_and_without_break(name, folder) | {"folder": folder} for name in MODULES}


def assert_like(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    for name, value in mine["weights"].items():
        torch.testing.assert_close(value, theirs["weights"][name], rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODULES)
def test_one_rank_trains_as_a_single_device_and_resumes(
    name: str, plain: Any, tmp_path: Path
) -> None:
    before = dict(os.environ)
    found = with_and_without_break(name, tmp_path, lambda: strategy_of(tmp_path))
    assert dict(os.environ) == before  # no word of ranks that another library would join
    assert [len(found[word]["losses"]) for word in WORDS] == [
        NUM_STEPS,
        NUM_STEPS // 2,
        NUM_STEPS // 2,
    ]
    for word in WORDS:
        assert_like(found[word], plain[name][word])


def test_a_run_is_resumed_after_its_backbone_was_unfrozen(tmp_path: Path) -> None:
    found = {}
    for word in ("plain", "ours"):
        (tmp_path / word).mkdir()
        for num_steps, resume, save in ((5, None, "5.ckpt"), (9, "5.ckpt", "9.ckpt")):
            strategy: Any = strategy_of(tmp_path) if word == "ours" else "auto"
            places = [None if name is None else tmp_path / word / name for name in (resume, save)]
            run = fit("tuned", tmp_path, strategy, 1, num_steps, *places)
            rates = [group["lr"] for group in run["trainer"].optimizers[0].param_groups]
            found[word, num_steps] = {**run, "rates": rates}
            if word == "ours":
                strategy.close()
    for num_steps in (5, 9):
        assert_like(found["ours", num_steps], found["plain", num_steps])
        assert found["ours", num_steps]["rates"] == found["plain", num_steps]["rates"]
    assert len(set(found["ours", 9]["rates"])) == 2
    before, after = (
        found["ours", num_steps]["weights"]["backbone.0.weight"] for num_steps in (5, 9)
    )
    assert not torch.equal(before, after)


@pytest.mark.slow
def test_two_ranks_train_as_a_single_device_and_resume(plain: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ranks = launch(HERE / "lightning_trainings.py", 2, tmp_path / "out", str(tmp_path))
    for name in MODULES:
        for word in WORDS:
            for found in (rank[name] for rank in ranks):
                assert_like(found[word], plain[name][word])
                assert_same_tensors(found[word]["weights"], ranks[0][name][word]["weights"])


def test_a_single_devices_checkpoint_is_continued(plain: Any, tmp_path: Path) -> None:
    saved = plain["words"]["folder"] / "words.ckpt"
    strategy = strategy_of(tmp_path)
    found = fit("words", tmp_path, strategy, resume=saved)
    assert_like(found, plain["words"]["second"])
    strategy.close()


def test_a_trained_module_is_tested_saved_again_and_given_back(plain: Any, tmp_path: Path) -> None:
    strategy = strategy_of(tmp_path)
    found = fit("boring", tmp_path, strategy)
    trainer, module = found["trainer"], found["module"]
    for _ in range(2):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer.test(module, verbose=False)
    with pytest.raises(
        ValueError, match=r"call strategy\.close\(materialize=True\) before another fit"
    ):
        trainer.fit(module)
    strategy.close(materialize=True)
    assert_same_tensors(dict(module.state_dict()), found["weights"])
    alone = strategy_of(tmp_path)
    other = built("boring", 2)
    tester = Trainer(accelerator="cpu", strategy=alone, logger=False, enable_progress_bar=False)
    tester.test(other, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert_same_tensors(dict(other.state_dict()), found["weights"])
    alone.close()


@pytest.mark.parametrize("name", ["boring", "tuned"])
def test_a_module_is_tested_before_it_is_trained(name: str, plain: Any, tmp_path: Path) -> None:
    strategy = strategy_of(tmp_path)
    assert_like(fit(name, tmp_path, strategy, is_tested=True), plain[name]["whole"])
    strategy.close()


class Validated(Callback):
    """The losses of validation, and a number that ModelCheckpoint compares."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["x"]))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        module.log("step_number", float(trainer.global_step))


def test_callbacks_keep_and_remove_checkpoints_and_validation_runs_in_fit(tmp_path: Path) -> None:
    found = {}
    for word in ("plain", "ours"):
        strategy: Any = strategy_of(tmp_path) if word == "ours" else "auto"
        keeper = ModelCheckpoint(
            tmp_path / word,
            "{step}",
            "step_number",
            save_last=True,
            save_top_k=2,
            mode="max",
            every_n_train_steps=1,
        )
        validated = Validated()
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=6, max_epochs=9, callbacks=[validated, keeper],
            logger=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=2,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(built("boring", 2))
        found[word] = (
            sorted(each.name for each in (tmp_path / word).iterdir()),
            len(validated.losses),
            validated.losses,
        )
        if word == "ours":
            strategy.close()
            other, again = built("boring", 1), strategy_of(tmp_path)
            Trainer(
                accelerator="cpu", strategy=again, logger=False, enable_progress_bar=False
            ).validate(other, ckpt_path=keeper.best_model_path, verbose=False)
            again.close()
    assert (
        found["ours"][:2] == found["plain"][:2] == (["last.ckpt", "step=5.ckpt", "step=6.ckpt"], 6)
    )
    assert found["ours"][2] == pytest.approx(found["plain"][2], rel=1e-5)


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(Boring):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]

    module = Two()
    module.automatic_optimization = False
    trainer = Trainer(
        accelerator="cpu", strategy=strategy_of(tmp_path), max_steps=1, logger=False, barebones=True
    )
    with pytest.raises(ValueError, match="gives 2 optimizers"):
        trainer.fit(module)


@pytest.mark.parametrize(
    "options",
    [
        {"tiermem": None},
        {"stage": 3, "offload_optimizer": True, "nvme_path": "/nvme"},
        {"ddp_comm_hook": print},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_what_the_strategy_would_not_read_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{', '.join(sorted(options))} given; allowed are policy"):
        TiermemStrategy(**options)


def test_batch_norms_over_the_ranks_are_refused(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"sync_batchnorm": True, "max_steps": 1, "barebones": True}
    trainer = Trainer(accelerator="cpu", strategy=strategy_of(tmp_path), **asked)
    with pytest.raises(ValueError, match="sync_batchnorm=True"):
        trainer.fit(Boring())
