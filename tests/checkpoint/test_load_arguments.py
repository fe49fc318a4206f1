"""Do load_checkpoint's arguments mean what the reference documents, and do its errors say what to
do?"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, weights_of
from runs import live_states
from saved_by_hand import pieces_of, write
from test_resume import check_same, counters, started, states, train
from torch import nn

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.format.fields import seal
from tiermem.checkpoint.format.finding import NothingSaved
from tiermem.checkpoint.opening.verified import DamagedState


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tiermem.Engine]:
    """An engine that has saved `old` after two steps and `new` after three, with room for both."""
    engine = started(tmp_path)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "ck", "old", copy=True)
    train(engine, range(2, 3))
    engine.save_checkpoint(tmp_path / "ck", "new")
    yield engine
    engine.close()


# ---- what is taken -------------------------------------------------------------------------------


def test_the_module_alone_leaves_states_counters_and_schedule(
    saved: tiermem.Engine, tmp_path: Path
) -> None:
    other = started(tmp_path, seed=3)
    train(other, range(1))
    before, moments = counters(other), {n: v for n, v in states(other).items() if "exp_avg" in n}
    other.load_checkpoint(tmp_path / "ck", load_module_only=True)
    assert counters(other) == before
    assert_same_tensors(weights_of(other.module), weights_of(saved.module))
    assert_same_tensors({n: v for n, v in states(other).items() if "exp_avg" in n}, moments)
    other.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept_as", ["exact", "compact"])
@pytest.mark.parametrize("loads_masters", [True, False])
def test_without_optimizer_states_masters_are_exact_or_the_weights_and_moments_new(
    loads_masters: bool, kept_as: str, tmp_path: Path
) -> None:
    first = started(tmp_path, preset="exact")
    other = started(tmp_path, preset=kept_as, seed=3, loads_masters=loads_masters)
    train(first, range(3))
    first.save_checkpoint(tmp_path / "ck")
    other.load_checkpoint(tmp_path / "ck", load_optimizer_states=False)
    found, due = states(other), states(first)
    assert not any(value.any() for name, value in found.items() if "exp_avg" in name)
    for name, value in weights_of(first.module).items():
        assert torch.equal(found[f"{name}.weight"], value)
        if f"{name}.master" in found:
            assert torch.equal(
                found[f"{name}.master"],
                due[f"{name}.master"] if loads_masters else value.float().view(-1),
            )
    assert other.global_steps == 3
    assert other.get_lr() == first.get_lr()
    for _, shard in other.shards.parameters():
        shard.param.grad = None
    before = states(other)
    other.backward(loss_of(other, 3) * 0.0)
    other.optimizer.param_groups[0]["weight_decay"] = 0.0
    other.step()  # the first step starts from the masters that were put
    after = states(other)
    assert all(
        torch.equal(after[name], value) for name, value in before.items() if name.endswith("master")
    )
    first.close()
    other.close()


def test_masters_are_made_from_the_weights_when_the_config_says_so(tmp_path: Path) -> None:
    first = started(tmp_path, preset="exact")
    other = started(tmp_path, preset="exact", seed=3, loads_masters=False)
    train(first, range(3))
    first.save_checkpoint(tmp_path / "ck")
    other.load_checkpoint(tmp_path / "ck")
    found, due = states(other), states(first)
    for name, value in found.items():
        weight = due[name.replace(".master", ".weight")].float().view(-1)
        assert torch.equal(value, weight if name.endswith(".master") else due[name]), name
    first.close()
    other.close()


def test_the_schedule_may_stay_where_it_is(saved: tiermem.Engine, tmp_path: Path) -> None:
    other = started(tmp_path, seed=3)
    assert other.lr_scheduler is not None
    before = other.lr_scheduler.state_dict()
    other.load_checkpoint(tmp_path / "ck", load_lr_scheduler_states=False)
    assert other.lr_scheduler.state_dict() == before
    assert other.get_lr() == saved.get_lr()  # the groups' own
    other.close()


def test_a_function_of_the_user_may_put_the_weights(saved: tiermem.Engine, tmp_path: Path) -> None:
    def halve(src: Mapping[str, torch.Tensor], dst: nn.Module) -> None:
        assert set(src) == set(dst.state_dict())
        dst.load_state_dict({name: value / 2 for name, value in src.items()})

    other = started(tmp_path, seed=3)
    other.load_checkpoint(tmp_path / "ck", custom_load_fn=halve)
    assert_same_tensors(
        weights_of(other.module),
        {name: value / 2 for name, value in weights_of(saved.module).items()},
    )
    found, due = states(other), states(saved)
    assert all(torch.equal(found[name], due[name]) for name in due if "exp_avg" in name)
    assert counters(other) == counters(saved)
    train(other, range(3, 4))
    other.close()


def test_an_engine_for_inference_takes_the_weights(saved: tiermem.Engine, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
    }
    other = tiermem.initialize(model=models.tied_tower(), config=config)[0]
    other.load_checkpoint(tmp_path / "ck")
    assert_same_tensors(weights_of(other.module), weights_of(saved.module))
    with torch.no_grad():
        assert torch.equal(loss_of(other, 9), loss_of(saved, 9))
    other.close()


def test_gradients_that_have_added_up_are_dropped(tmp_path: Path) -> None:
    engine = started(tmp_path, gradient_accumulation_steps=3)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "ck")
    due = train(engine, range(1, 2)), states(engine), counters(engine)
    engine.backward(loss_of(engine, 50))
    engine.step()
    engine.load_checkpoint(tmp_path / "ck")
    assert train(engine, range(1, 2)) == due[0]
    check_same(engine, *due[1:])
    engine.close()


def test_the_plain_face_opens_what_it_saved(tmp_path: Path) -> None:
    model = models.ShortTower()
    policy = tiermem.OffloadPolicy(
        optim=tiermem.Tier.NVME, params=tiermem.Tier.NVME, paths=[tmp_path]
    )
    beside = nn.Parameter(torch.randn(7))
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW([*model.parameters(), beside], lr=0.1)
        for step in range(4):
            if step == 2:
                checkpoint.save(shards, optim, tmp_path / "ck", client_state={"seen": (1, 2)})
                kept = beside.detach().clone()
                optim.param_groups[0]["lr"] = 0.7
            (loss_of(model, step) + beside.square().sum()).backward()
            optim.step()
            optim.zero_grad()
        loaded = checkpoint.load(shards, optim, tmp_path / "ck")
        assert loaded is not None
        assert (loaded.step, loaded.tag, loaded.client_state) == (
            2,
            "global_step2",
            {"seen": (1, 2)},
        )
        assert torch.equal(beside, kept)
        assert int(optim.state[beside]["step"]) == 2
        assert optim.param_groups[0]["lr"] == 0.1
        assert {shard.num_steps for _, shard in shards.parameters()} == {2}


def test_masters_of_ordinary_parameters_that_rest_are_saved(tmp_path: Path) -> None:
    def opened(seed: int) -> tuple[tiermem.Shards, tiermem.AdamW, nn.Parameter]:
        torch.manual_seed(seed)
        model, beside = models.ShortTower(), nn.Parameter(torch.randn(64).bfloat16())
        policy = tiermem.OffloadPolicy(optim=tiermem.Tier.HOST)
        shards = tiermem.shard(model, policy)
        return shards, tiermem.AdamW([*model.parameters(), beside], lr=1e-3, policy=policy), beside

    def states_of(optim: tiermem.AdamW) -> dict[str, torch.Tensor]:
        *_, found = optim.state_dict()["state"].values()
        return found

    shards, optim, beside = opened(0)
    for _ in range(3):
        beside.grad = torch.rand_like(beside)
        optim.step()
    checkpoint.save(shards, optim, tmp_path / "ck")
    other_shards, other, _ = opened(1)
    checkpoint.load(other_shards, other, tmp_path / "ck")
    assert "master" in states_of(optim)
    assert_same_tensors(states_of(other), states_of(optim))
    for each in (shards, other_shards):
        each.close()


class Scaled(nn.Linear):
    """Has a state beside its tensors."""

    scale: Any = (2, torch.ones(1))

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_the_extra_states_of_modules_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = nn.Sequential(*(Scaled(3, 3) for _ in range(3)))
    made[1].scale, made[2].scale = (5, torch.zeros(2)), object()
    with tiermem.shard(made, tiermem.OffloadPolicy()) as shards:
        checkpoint.save(shards, None, tmp_path)
        assert "2._extra_state['scale'] is a builtins.object" in caplog.text
        for module in made:
            module.scale = None
        checkpoint.load(shards, None, tmp_path)
    assert [made[0].scale, made[2].scale] == [Scaled.scale, None]
    assert made[1].scale[0] == 5 and torch.equal(made[1].scale[1], torch.zeros(2))
    assert "has no 2._extra_state" in caplog.text
    other = nn.Sequential(Scaled(3, 3), *(nn.Linear(3, 3) for _ in range(2)))
    with (
        tiermem.shard(other, tiermem.OffloadPolicy()) as shards,
        pytest.raises(ValueError, match=r"Not in the model: 1\._extra_state"),
    ):
        checkpoint.load(shards, None, tmp_path)


def test_states_that_were_saved_without_an_optimizer_are_not_opened(tmp_path: Path) -> None:
    """Earlier saves had them: whose moments they are, they did not say."""
    made = nn.Linear(13, 7)
    saved = {
        name: {state: torch.ones_like(param) for state in ("weight", "exp_avg", "exp_avg_sq")}
        for name, param in made.named_parameters()
    }
    write(tmp_path, saved)
    with tiermem.shard(made, tiermem.OffloadPolicy()) as shards:
        optim = tiermem.AdamW(made.parameters())
        made(torch.ones(2, 13)).sum().backward()
        optim.step()
        loaded = checkpoint.load(shards, optim, tmp_path)
        assert loaded is not None and not loaded.has_states
        found = live_states(shards)
        assert {shard.num_steps for _, shard in shards.parameters()} == {0}
    assert all(bool(value.all()) != ("exp" in state) for (_, state), value in found.items())


def test_frozen_parameters_that_were_left_out_stay_as_they_are(tmp_path: Path) -> None:
    first, other = (started(tmp_path, build=models.frozen_tower, seed=seed) for seed in (0, 3))
    train(first, range(2))
    first.save_checkpoint(tmp_path / "ck", exclude_frozen_parameters=True)
    before, due = weights_of(other.module), weights_of(first.module)
    other.load_checkpoint(tmp_path / "ck")
    for name, value in weights_of(other.module).items():
        is_frozen = not first.module.get_parameter(name).requires_grad
        assert torch.equal(value, before[name] if is_frozen else due[name]), name
    train(other, range(2, 3))
    first.close()
    other.close()


# ---- what does not fit ---------------------------------------------------------------------------


def test_other_parameters_are_an_error_with_both_lists_or_a_warning(
    saved: tiermem.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wider() -> nn.Module:
        model = models.tied_tower(num_blocks=2)
        model.extra = nn.Linear(3, 2)
        return model

    other = started(tmp_path, build=wider, seed=3)
    before = weights_of(other.module)
    both = r"Missing in the checkpoint: extra.weight, extra.bias. Not in the model: layers.2.norm.weight, layers.2.norm.bias"
    with pytest.raises(ValueError, match=both):
        other.load_checkpoint(tmp_path / "ck")
    assert_same_tensors(weights_of(other.module), before)
    with caplog.at_level(logging.WARNING, "tiermem"):
        other.load_checkpoint(tmp_path / "ck", load_module_strict=False)
    assert any(re.search(both, record.getMessage()) for record in caplog.records)
    after, due = weights_of(other.module), weights_of(saved.module)
    assert all(torch.equal(after[n], before[n] if n.startswith("extra") else due[n]) for n in after)
    other.close()


def test_another_shape_and_another_optimizer_are_refused_before_anything_changes(
    saved: tiermem.Engine, tmp_path: Path
) -> None:
    lion = started(tmp_path, seed=3, optimizer={"type": "Lion", "params": {"lr": 1e-3}})
    before = states(lion)
    with pytest.raises(
        ValueError,
        match=r"saved by AdamW, and this optimizer is Lion: .* load_optimizer_states=False",
    ):
        lion.load_checkpoint(tmp_path / "ck")
    assert_same_tensors(states(lion), before)
    lion.load_checkpoint(tmp_path / "ck", load_optimizer_states=False)
    assert_same_tensors(weights_of(lion.module), weights_of(saved.module))
    lion.close()
    narrow = started(tmp_path, build=lambda: nn.ModuleDict({"embed": nn.Embedding(5, 31)}))
    with pytest.raises(
        ValueError, match=r"embed.weight is \(61, 31\) in the checkpoint and \(5, 31\) in the model"
    ):
        narrow.load_checkpoint(tmp_path / "ck", load_module_strict=False)
    narrow.close()


def test_nothing_saved_is_a_warning_and_a_missing_tag_an_error(
    saved: tiermem.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tiermem"):
        assert saved.load_checkpoint(tmp_path / "nowhere") == (None, None)
    assert "nothing is opened" in caplog.text
    with pytest.raises(FileNotFoundError, match="no tag 'newest' here; those there are: new, old"):
        saved.load_checkpoint(tmp_path / "ck", "newest")
    with pytest.raises(ValueError, match="save_dir is empty"):
        saved.save_checkpoint("")


# ---- damage --------------------------------------------------------------------------------------


def flip_in_segment(folder: Path, param: str, state: str) -> None:
    with checkpoint.Source.open(folder) as source:
        piece = next(p for p in pieces_of(source.parts[0]) if (p.param, p.state) == (param, state))
        file = source.file.parent / source.parts[0].files[piece.file]
    with open(file, "r+b") as stream:
        stream.seek(piece.offset + 9)
        byte = stream.read(1)[0]
        stream.seek(piece.offset + 9)
        stream.write(bytes([byte ^ 16]))


def test_a_flipped_bit_on_nvme_is_named_and_the_older_tag_opens(
    saved: tiermem.Engine, tmp_path: Path
) -> None:
    saved.close()
    flip_in_segment(tmp_path / "ck", "layers.1.up.weight", "exp_avg_sq")
    other = started(tmp_path, seed=3)
    with pytest.raises(
        DamagedState, match=r"exp_avg_sq of layers.1.up.weight.*step 3.*tag='old'.*segment.bin"
    ) as caught:
        other.load_checkpoint(tmp_path / "ck")
    assert caught.value.filename.endswith("segment.bin")
    for call in (lambda: loss_of(other, 0), other.step):
        with pytest.raises(RuntimeError, match="mixture of two steps"):
            call()
    assert other.optimizer is not None
    other.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="mixture of two steps"):
        checkpoint.save(other.shards, other.optimizer, tmp_path / "never")
    path, _ = other.load_checkpoint(tmp_path / "ck", allow_older=True)
    assert path == str(tmp_path / "ck" / "old")
    assert other.global_steps == 2
    train(other, range(2, 3))
    other.close()


def test_a_deleted_or_cut_segment_leaves_the_engine_as_it_was(
    saved: tiermem.Engine, tmp_path: Path
) -> None:
    saved.close()
    (segment,) = tmp_path.glob("tiermem-*/segment.bin")
    os.truncate(segment, 4096)
    other = started(tmp_path, seed=3)
    before = states(other)
    with pytest.raises(ValueError, match=r"segment.bin: has 4096 bytes.*it was cut.*tag='old'"):
        other.load_checkpoint(tmp_path / "ck")
    segment.unlink()
    with pytest.raises(FileNotFoundError, match=r"segment.bin"):
        other.load_checkpoint(tmp_path / "ck")
    assert_same_tensors(states(other), before)
    other.load_checkpoint(tmp_path / "ck", "old")
    train(other, range(2, 3))
    other.close()


def test_a_read_only_copy_opens(saved: tiermem.Engine, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "ck" / "old", tmp_path / "mounted")
    for file in (tmp_path / "mounted").iterdir():
        file.chmod(0o400)
    (tmp_path / "mounted").chmod(0o500)
    saved.load_checkpoint(tmp_path / "mounted")
    assert saved.global_steps == 2
    (tmp_path / "mounted").chmod(0o700)


HOLD = """
import sys, tiermem.swap.disk.run_folder as r, pathlib
folder = r.RunFolder.claim(pathlib.Path(sys.argv[1]))
print("held", flush=True); sys.stdin.read(); folder.close(keep=True)
"""


def test_the_store_of_another_live_process_is_refused(
    saved: tiermem.Engine, tmp_path: Path
) -> None:
    saved.close()
    (segment,) = tmp_path.glob("tiermem-*/segment.bin")
    command: list[Any] = [sys.executable, "-c", HOLD, segment.parent]
    other = started(tmp_path, seed=3)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OSError, match=r"another process has taken it over.*tag='old'"):
            other.load_checkpoint(tmp_path / "ck")
        other.load_checkpoint(tmp_path / "ck", "old")
        holder.stdin.close()
    other.load_checkpoint(tmp_path / "ck")
    assert other.global_steps == 3
    other.close()


def test_tags_without_latest_are_listed_or_the_newest_is_opened(
    saved: tiermem.Engine, tmp_path: Path
) -> None:
    (tmp_path / "ck" / "latest").unlink()
    with pytest.raises(
        NothingSaved, match=r"no file named latest.*: new, old; or give newest=True"
    ):
        saved.load_checkpoint(tmp_path / "ck")
    path, _ = saved.load_checkpoint(tmp_path / "ck", newest=True)
    assert path == str(tmp_path / "ck" / "new")


RESEALED = {
    "client_state": {
        "x": {"$": "tensor", "dtype": "fp32", "shape": [0, 1 << 47, 1 << 47], "value": ""}
    },
    "config": {"x": {"$": "ndarray", "dtype": "f4", "shape": [0, 1 << 47, 1 << 47], "value": ""}},
    "scheduler": [1],
    "loss_scaler": "x",
    "engine": "x",
}


@pytest.mark.parametrize("field", [*RESEALED, "a counter", "a schedule"])
def test_a_value_of_another_kind_is_named_before_anything_changes(
    saved: tiermem.Engine, tmp_path: Path, field: str
) -> None:
    """As somebody writes it who makes the checksum right."""
    tag = tmp_path / "ck" / "old"
    (tag / "tiermem.json").unlink()
    file = next(tag.glob("manifest-*.json"))
    content = json.loads(file.read_text())
    del content["crc32c"]
    if field in RESEALED:
        content[field] = RESEALED[field]
    elif field == "a counter":
        field, content["engine"] = "engine", {**content["engine"], "global_steps": "7"}
    else:
        field, content["scheduler"] = "scheduler", {"$": "tuple", "value": []}
    file.write_bytes(seal(content))
    before, was = weights_of(saved.module), counters(saved)
    with pytest.raises(checkpoint.ManifestError, match=field):
        saved.load_checkpoint(tmp_path / "ck", "old")
    assert_same_tensors(weights_of(saved.module), before)
    assert counters(saved) == was
