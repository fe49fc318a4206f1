"""Does an engine save what the reference's users expect, and as its config says?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Layers
from programs.twins import weights_of
from runs import opened, states_in
from saved_by_hand import latest_of
from torch import nn

import tiermem
from tiermem import checkpoint
from tiermem.swap.base.errors import CorruptionError


def engine_on(path: Path, own: dict[str, Any] | None = None, **sections: Any) -> tiermem.Engine:
    nvme = {"device": "nvme", "nvme_path": str(path)}
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": nvme,
        "offload_optimizer": nvme,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    config |= {"zero_optimization": zero, "steps_per_print": None, "tiermem": own or {}, **sections}
    torch.manual_seed(0)
    model = Layers(*(nn.Sequential(nn.Linear(67, 67), nn.Tanh()) for _ in range(3)))
    return tiermem.initialize(model=model, config=config)[0]


def step(engine: tiermem.Engine, times: int = 1) -> None:
    for number in range(times):
        backward(engine, number)
        engine.step()


def backward(engine: tiermem.Engine, number: int) -> None:
    x = torch.randn(3, 67, generator=torch.Generator().manual_seed(number))
    engine.backward(engine(x).square().mean())


def test_the_default_tag_counts_steps_and_latest_names_it(tmp_path: Path) -> None:
    engine = engine_on(tmp_path)
    step(engine, 3)
    assert engine.save_checkpoint(str(tmp_path / "out"), client_state={"best": 0.5}) is True
    assert latest_of(tmp_path / "out") == "global_step3"
    _, manifest, _ = opened(tmp_path / "out", "global_step3")
    assert checkpoint.decode(manifest.client_state, "") == {"best": 0.5}
    assert manifest.engine["global_steps"] == 3 and manifest.engine["micro_steps"] == 3
    assert manifest.config["train_micro_batch_size_per_gpu"] == 1
    engine.save_checkpoint(tmp_path / "out", 7, save_latest=False)
    assert (tmp_path / "out" / "7" / "tiermem.json").exists() and latest_of(
        tmp_path / "out"
    ) == "global_step3"
    assert engine.load_checkpoint(tmp_path / "out", 7)[0] is not None  # type: ignore[arg-type]  # as it was saved
    engine.close()


@pytest.mark.parametrize("method", ["save_checkpoint", "load_checkpoint", "save_16bit_model"])
@pytest.mark.parametrize(
    ("given", "told"), [("", "empty"), (None, "None"), (7, "7"), (b"out", "b'out'")]
)
def test_what_names_no_folder_is_refused(
    given: Any, told: str, method: str, tmp_path: Path
) -> None:
    engine = engine_on(tmp_path)
    with pytest.raises(ValueError, match=rf"_dir is {told}; give the folder of checkpoints"):
        getattr(engine, method)(given)
    engine.close()


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("stage", "overlap"), [(0, "none"), (2, "forward"), (3, "backward")])
def test_a_save_within_an_accumulation_warns_and_changes_no_step(
    stage: int, overlap: str, copy: bool, tmp_path: Path
) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | (
        {"offload_optimizer": nvme} if stage else {}
    )
    if stage == 3:
        zero["offload_param"] = nvme
    found = []
    for is_saved in (False, True):
        engine = engine_on(
            tmp_path, {"overlap": overlap}, zero_optimization=zero, gradient_accumulation_steps=2
        )
        step(engine, 2)
        ended = weights_of(engine.module)
        for number in range(4):
            backward(engine, number)
            if is_saved:  # also before the step that ends an accumulation
                with pytest.warns(
                    UserWarning, match=rf"gradients of {number % 2 + 1} micro-batches .* not saved"
                ):
                    engine.save_checkpoint(tmp_path / "out", f"{overlap}{number}", copy=copy)
            engine.step()
            if is_saved and number == 0:
                with pytest.warns(UserWarning, match="gradients of 1 micro-batches"):
                    engine.save_checkpoint(tmp_path / "out", "within", copy=copy)
        engine.wait_checkpoint()
        found.append(weights_of(engine.module))
        engine.close()
    assert [torch.equal(found[0][name], found[1][name]) for name in found[0]] == [True] * len(ended)
    resumed = engine_on(tmp_path, zero_optimization=zero, gradient_accumulation_steps=2)
    resumed.load_checkpoint(tmp_path / "out", f"{overlap}0" if copy else f"{overlap}3")
    if copy:  # of the store's own files the newest tag stays
        assert all(
            torch.equal(each, ended[name]) for name, each in weights_of(resumed.module).items()
        )
        assert (resumed.global_steps, resumed.micro_steps) == (1, 2)
    assert resumed.micro_steps % 2 == 0
    step(resumed)
    assert not resumed.was_step_applied()
    step(resumed)
    assert resumed.was_step_applied()
    resumed.close()


def test_durability_step_makes_every_step_durable(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, {"durability": "step"})
    folder = engine.shards.store.folders()[0]
    for number in (1, 2, 3):
        step(engine)
        engine.wait_checkpoint()
        assert [file.name for file in folder.glob("manifest-*")] == [f"manifest-{number}.json"]
    engine.close()
    assert folder.exists() and not (folder / "lock").exists()


def test_a_step_without_a_tag_gives_way_to_the_run_that_goes_on(tmp_path: Path) -> None:
    first = engine_on(tmp_path, {"durability": "step"})
    step(first, 2)
    folder = first.shards.store.folders()[0]
    first.close()
    again = engine_on(tmp_path, {"durability": "step"})
    assert again.load_checkpoint(folder)[0] is not None
    assert folder.exists() and again.global_steps == 2
    step(again)
    again.wait_checkpoint()
    assert not folder.exists() and len(list(tmp_path.glob("tiermem-*"))) == 1
    again.save_checkpoint(tmp_path / "out")
    again.close()
    third = engine_on(tmp_path, {"durability": "step"})
    assert third.load_checkpoint(tmp_path / "out")[0] is not None
    step(third)
    third.wait_checkpoint()
    assert len(list(tmp_path.glob("tiermem-*"))) == 2  # a tag stays
    third.close()


def test_keep_is_the_number_of_tags_that_stay(tmp_path: Path) -> None:
    for keep in (1, 2):
        (tmp_path / str(keep)).mkdir()
        engine = engine_on(tmp_path / str(keep), {"keep": keep})
        for _ in range(3):
            step(engine)
            engine.save_checkpoint(tmp_path / str(keep) / "out")
        assert len(list((tmp_path / str(keep) / "out").glob("global_step*"))) == keep
        engine.close()


@pytest.mark.parametrize("verify", ["always", "resume"])
def test_verify_says_which_reads_are_compared(tmp_path: Path, verify: str) -> None:
    engine = engine_on(tmp_path, {"verify": verify, "keep": 1, "overlap": "none"})
    step(engine)
    engine.shards.store.flush()
    engine.shards.drop_head_start()
    with open(engine.shards.store.folders()[0] / "segment.bin", "r+b") as file:
        size = file.seek(0, 2)
        for place in range(100, size, 4096):
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))
    if verify == "always":
        with pytest.raises(CorruptionError):
            step(engine)
    else:
        step(engine)
    engine.close()


def test_a_copy_is_made_while_training_goes_on(tmp_path: Path) -> None:
    engine = engine_on(tmp_path)
    step(engine, 2)
    engine.save_checkpoint(tmp_path / "out", "in place")
    saved = states_in(tmp_path / "out", "in place")
    engine.close()
    engine = engine_on(tmp_path)
    assert engine.load_checkpoint(tmp_path / "out")[0] is not None
    engine.save_checkpoint(tmp_path / "out", "copy", copy=True)
    step(engine, 2)
    engine.wait_checkpoint()
    engine.close()
    assert states_in(tmp_path / "out", "copy") == saved
    assert all(
        file.parent == tmp_path / "out" / "copy" for file in (tmp_path / "out" / "copy").rglob("*")
    )
