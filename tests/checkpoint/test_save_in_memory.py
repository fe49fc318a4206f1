"""Is everything that a run needs in a complete copy of states that rest in memory?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import files_below, live_states, model, opened, policy, states_in, train
from saved_by_hand import latest_of, pieces_of

import tiermem
from tiermem import checkpoint
from tiermem.precision import Precision


@pytest.mark.parametrize("where", ["none", "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_state_is_saved_to_the_bit(tmp_path: Path, where: str, stage: int) -> None:
    if where == "cpu" and stage == 0:
        pytest.skip("stage 0 has no offload")
    made = model()
    with tiermem.shard(made, policy(where, tmp_path, stage=stage)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 2)
        assert checkpoint.save(shards, optimizer, tmp_path / "out", "first")
        live = live_states(shards)
        saved = states_in(tmp_path / "out", "first")
        for (name, state), value in live.items():
            if value.numel() and state != "master":  # an fp32 weight is its own master
                assert saved[name, state] == value.numpy().tobytes(), (name, state)
        assert saved["norm.running_mean", "weight"] == made.norm.running_mean.numpy().tobytes()
        assert latest_of(tmp_path / "out") == "first"
        assert set(states_in(tmp_path / "out", "first")) == {
            (name, state)
            for (name, state), value in live.items()
            if value.numel() and state != "master"
        } | {
            (f"norm.{name}", "weight")
            for name in ("running_mean", "running_var", "num_batches_tracked")
        }


def test_the_manifest_says_what_there_is(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("cpu", tmp_path)) as shards:
        optimizer = tiermem.AdamW(
            [{"params": [made.scale], "lr": 0.5}, {"params": list(made.layers.parameters())}],
            lr=0.01,
        )
        train(made, optimizer, 3)
        checkpoint.save(shards, optimizer, tmp_path, client_state={"epoch": (1, 2)})
        _, manifest, [(_, part)] = opened(tmp_path, "global_step3")
    by_name = {each.name: each for each in manifest.parameters}
    assert (
        by_name["embed.weight"].aliases == ("head.weight",)
        and by_name["embed.weight"].group is None
    )
    assert (
        by_name["scale"].shape == ()
        and by_name["scale"].group == 0
        and by_name["scale"].num_steps == 3
    )
    assert by_name["layers.1.bias"].group == 1
    assert by_name["empty"].shape == (0, 3) and not by_name["frozen.weight"].is_trainable
    assert by_name["norm.running_var"].role == "buffer" and "passing" not in by_name
    assert manifest.step == 3 and manifest.world == 1
    assert manifest.optimizer["name"] == "AdamW"
    assert manifest.optimizer["groups"][0]["params"] == ["scale"]
    assert manifest.optimizer["groups"][0]["values"]["lr"] == 0.5
    assert checkpoint.decode(manifest.client_state, "client_state") == {"epoch": (1, 2)}
    assert torch.equal(checkpoint.decode(part.rng, "rng")["torch"], torch.get_rng_state())


@pytest.mark.parametrize("preset", ["compact", "bf16", "tiny"])
def test_smaller_states_are_saved_as_they_are_kept(tmp_path: Path, preset: str) -> None:
    made = model(dtype=torch.bfloat16)
    with tiermem.shard(made, policy("cpu", tmp_path, precision=Precision.preset(preset))) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        train(made, optimizer, 2)
        checkpoint.save(shards, optimizer, tmp_path, "t")
        saved, (_, _, [(_, part)]) = states_in(tmp_path, "t"), opened(tmp_path, "t")
    numel, name = 37 * 13, "embed.weight"
    kinds = {(piece.param, piece.state): piece.kind for piece in pieces_of(part)}
    assert kinds[name, "weight"] == "bf16" and len(saved[name, "weight"]) == 2 * numel
    assert kinds.get((name, "master")) == (None if preset == "bf16" else "split")
    assert kinds[name, "exp_avg"] == ("8bit" if preset == "tiny" else "bf16")
    if preset == "tiny":
        assert len(saved[name, "exp_avg_sq"]) == numel and len(
            saved[name, "exp_avg_sq.scales"]
        ) == -(-numel // 64)


def test_what_was_never_stepped_has_weights_alone(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("cpu", tmp_path)) as shards:
        checkpoint.save(shards, tiermem.AdamW(made.parameters()), tmp_path, "t")
        assert {state for _, state in states_in(tmp_path, "t")} == {"weight"}


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_weights_alone_are_saved_without_an_optimizer(tmp_path: Path, where: str) -> None:
    made = model(dtype=torch.bfloat16)
    precision = Precision.preset("compact")
    with tiermem.shard(made, policy(where, tmp_path, precision=precision)) as shards:
        optimizer = tiermem.AdamW(made.parameters())
        train(made, optimizer, 2)
        for stepped, states in ((optimizer, 4), (None, 1)):
            checkpoint.save(shards, stepped, tmp_path, "t")
            assert len({state for _, state in states_in(tmp_path, "t")}) == states
        _, manifest, _ = opened(tmp_path, "t")
    assert {each.num_steps for each in manifest.parameters} == {0}


def test_frozen_parameters_are_left_out_when_asked(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("cpu", tmp_path)) as shards:
        checkpoint.save(shards, None, tmp_path, "t", exclude_frozen_parameters=True)
        _, manifest, _ = opened(tmp_path, "t")
    assert manifest.excluded == ("frozen.weight", "frozen.bias")
    assert "frozen.weight" not in {each.name for each in manifest.parameters}


def test_parameters_beside_the_model_are_saved_with_their_states(tmp_path: Path) -> None:
    made, beside = model(), torch.nn.Parameter(torch.randn(70).bfloat16())
    with tiermem.shard(made, policy("cpu", tmp_path)) as shards:
        optimizer = tiermem.AdamW([*made.parameters(), beside], lr=0.01)
        beside.grad = torch.randn(70).bfloat16()
        optimizer.step()
        checkpoint.save(shards, optimizer, tmp_path, "t")
        saved, (_, manifest, _) = states_in(tmp_path, "t"), opened(tmp_path, "t")
    [own] = [each for each in manifest.parameters if each.role == "ordinary"]
    assert own.numel == 70 and own.num_steps == 1
    assert {state for name, state in saved if name == own.name} == {
        "weight",
        "master",
        "exp_avg",
        "exp_avg_sq",
    }
    assert saved[own.name, "exp_avg"] == optimizer.state[beside]["exp_avg"].numpy().tobytes()


def test_a_tag_saved_again_replaces_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    made = model()
    with tiermem.shard(made, policy("cpu", tmp_path)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)
        checkpoint.save(shards, optimizer, tmp_path / "out", "t")
        before = states_in(tmp_path / "out", "t")
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, tmp_path / "out", "t", save_latest=False)
        assert states_in(tmp_path / "out", "t")["scale", "weight"] != before["scale", "weight"]
        # latest, pointer, manifest, part, data
        assert len(list(files_below(tmp_path / "out"))) == 5


@pytest.mark.parametrize("tag", ["", "..", "/a", "a\0b", "x" * 300])
def test_a_tag_that_is_no_folder_is_refused(tmp_path: Path, tag: str) -> None:
    made = model()
    with (
        tiermem.shard(made, policy("cpu", tmp_path)) as shards,
        pytest.raises(ValueError, match="tag is"),
    ):
        checkpoint.save(shards, None, tmp_path / "out", tag)
    assert not (tmp_path / "out").exists()


def test_a_client_state_that_has_no_place_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    made, state = model(), {"args": object()}
    with (
        tiermem.shard(made, policy("cpu", tmp_path)) as shards,
        pytest.raises(TypeError, match=r"client_state\['args'\]"),
    ):
        checkpoint.save(shards, None, tmp_path / "out", "t", client_state=state)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    made: Any = model()
    (tmp_path / "out").write_text("a file")
    with (
        tiermem.shard(made, policy("cpu", tmp_path)) as shards,
        pytest.raises(OSError, match="out"),
    ):
        checkpoint.save(shards, None, tmp_path / "out", "t")
    assert (tmp_path / "out").read_text() == "a file"


@pytest.mark.parametrize("where", ["none", "cpu", "nvme"])
def test_an_optimizer_without_states_is_saved_and_opened(tmp_path: Path, where: str) -> None:
    """Plain SGD of fp32 parameters: its tiles have no bytes, and no entry in the store."""
    weights = []
    for is_opened in (False, True):
        made = model()
        with tiermem.shard(made, policy(where, tmp_path)) as shards:
            optimizer = tiermem.SGD(made.parameters(), lr=0.01)
            if is_opened:
                checkpoint.load(shards, optimizer, tmp_path / "out")
            else:
                train(made, optimizer, 2)
                checkpoint.save(shards, optimizer, tmp_path / "out", copy=True)
                checkpoint.wait(shards)
            weights.append({name: value.clone() for name, value in made.state_dict().items()})
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
