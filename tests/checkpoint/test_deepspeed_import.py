"""Are weights, masters, moments and scalars of a DeepSpeed ZeRO-3 folder read to the bit, and is a
bad folder refused?"""

from __future__ import annotations

import enum
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.deepspeed_folders import FROZEN, TAG, their_classes, write_deepspeed

from tiermem.checkpoint.format.finding import NothingSaved, find
from tiermem.checkpoint.interchange.foreign import ForeignParameter
from tiermem.checkpoint.interchange.from_deepspeed import is_deepspeed, read_deepspeed
from tiermem.checkpoint.interchange.write import read_foreign


def values_of(parameter: ForeignParameter) -> dict[str, torch.Tensor]:
    return {
        state: torch.cat([torch.empty(0, dtype=kept.dtype), *kept.pieces()]).view(parameter.shape)
        for state, kept in parameter.states.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_state_is_read_to_the_bit(tmp_path: Path, num_ranks: int, dtype: torch.dtype) -> None:
    written = write_deepspeed(tmp_path / "ds", num_ranks, dtype)
    found = {p.name: p for p in read_deepspeed(tmp_path / "ds").parameters}
    assert set(found) == {*written.states, *written.buffers}
    for name, states in written.states.items():
        read = values_of(found[name])
        assert set(read) == set(states)
        for state, value in states.items():
            assert read[state].dtype == value.dtype
            assert torch.equal(read[state], value), (name, state)
    for name, value in written.buffers.items():
        assert found[name].is_buffer
        assert torch.equal(values_of(found[name])["weight"], value)
    assert found["embed.weight"].aliases == ("head.weight",)
    assert [p for p in found if not found[p].is_trainable] == list(FROZEN)
    assert {p: found[p].group for p in ("back.weight", "norm.weight", "frozen.bias")} == {
        "back.weight": 0, "norm.weight": 1, "frozen.bias": None,
    }  # fmt: skip
    assert {p.num_steps for p in found.values() if "exp_avg" in p.states} == {3}


def test_steps_that_groups_count_as_in_earlier_deepspeed_are_read(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 1, torch.float32)
    (file,) = (tmp_path / TAG).glob("*_optim_states.pt")
    with their_classes():
        found = torch.load(file, weights_only=False)
        kept = found["optimizer_state_dict"]["optimizer_state_dict"]
        for entry in kept["state"].values():
            del entry["step"]
        for group in kept["param_groups"]:
            group["step"] = 3
        torch.save(found, file)
    assert {p.num_steps for p in read_deepspeed(tmp_path).parameters if p.moments} == {3}


def test_scalars_come_along(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 2, torch.bfloat16, is_dynamic=True)
    found = read_deepspeed(tmp_path)
    assert [group["lr"] for group in found.groups] == [5e-4, 1e-4]
    assert found.groups[0]["betas"] == (0.9, 0.95)
    assert (found.global_steps, found.skipped_steps, found.global_samples) == (4, 1, 24)
    assert found.scheduler == {"last_epoch": 3, "base_lrs": [2e-3, 1e-3]}
    assert found.client_state == {"epoch": (2, "half")}
    assert found.loss_scale == {"scale": 512.0, "hysteresis_left": 2, "num_good": 10}
    assert found.left_behind == []


def test_an_extra_state_of_a_module_is_left_behind_by_name(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 1, torch.float32)
    file = tmp_path / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    found = torch.load(file, weights_only=False)
    found["module"]["hidden._extra_state"] = torch.ones(2)
    torch.save(found, file)
    assert read_deepspeed(tmp_path).left_behind == ["'hidden._extra_state' of the model"]


def test_members_of_enumerations_are_read_as_early_pythons_3_11_pickle_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    write_deepspeed(tmp_path, 1, torch.float32)
    assert b"getattr" in (tmp_path / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt").read_bytes()
    assert len(read_deepspeed(tmp_path).parameters) == 10
    write_deepspeed(tmp_path / "two", 1, torch.float32, stage=2)
    with pytest.raises(ValueError, match="ZeRO stage 2"):
        read_deepspeed(tmp_path / "two")


def test_a_tags_folder_is_opened_as_well(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 1, torch.float32)
    assert is_deepspeed(tmp_path / TAG) and is_deepspeed(tmp_path)
    assert (
        len(read_deepspeed(tmp_path / TAG).parameters)
        == len(read_deepspeed(tmp_path, TAG).parameters)
        == 10
    )
    assert not is_deepspeed(tmp_path / "nowhere")


def test_tags_are_listed_where_latest_names_none(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 1, torch.float32)
    (tmp_path / "latest").unlink()
    with pytest.raises(FileNotFoundError, match=rf"no file `latest` .*\({TAG}\): name one"):
        read_foreign(tmp_path)
    assert len(read_foreign(tmp_path, TAG).parameters) == 10


class Runs:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


def test_a_hostile_pickle_is_named_and_never_run(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 1, torch.float32)
    file = tmp_path / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save(
        {"module": {}, "param_shapes": [], "buffer_names": [], "x": Runs(tmp_path / "pwned")}, file
    )
    with pytest.raises(ValueError, match=r"model_states.pt: it holds posix.mkdir, which is code"):
        read_deepspeed(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_a_stand_in_class_does_not_open_a_door(tmp_path: Path) -> None:
    """The names that are looked at as attributes cannot be called into anything else."""
    write_deepspeed(tmp_path, 1, torch.float32)
    file = tmp_path / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    code = b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n(cos\nsystem\nX\x04\x00\x00\x00trueRtR."
    file.write_bytes(code)
    with pytest.raises(ValueError, match=r"optim_states.pt: "):
        read_deepspeed(tmp_path)


def test_ranks_that_are_missing_are_named(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 3, torch.float32)
    (tmp_path / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match="no optim states of rank 1"):
        read_deepspeed(tmp_path)
    (tmp_path / TAG / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match="model states of 3 ranks and optimizer states of 1"):
        read_deepspeed(tmp_path)
    for rank in (1, 2):
        (tmp_path / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match="written by 3 ranks, files of 1 are here"):
        read_deepspeed(tmp_path)
    (
        tmp_path / TAG / f"zero_pp_rank_{10**15}_mp_rank_00_model_states.pt"
    ).touch()  # the ranks before it are not counted
    with pytest.raises(ValueError, match=r"no model states of rank 1$"):
        read_deepspeed(tmp_path)


def shorter(kept: dict[str, Any]) -> None:
    kept["optimizer_state_dict"]["param_groups"].pop()


def without_states(kept: dict[str, Any]) -> None:
    del kept["optimizer_state_dict"]["state"][1]


def without_a_moment(kept: dict[str, Any]) -> None:
    del kept["optimizer_state_dict"]["state"][1]["exp_avg_sq"]


def another_step(kept: dict[str, Any]) -> None:
    kept["optimizer_state_dict"]["state"][1]["step"] = torch.tensor(9.0)


def a_sub_group_more(kept: dict[str, Any]) -> None:
    kept["fp32_flat_groups"].append(torch.ones(2))


def other_shapes(found: dict[str, Any]) -> None:
    found["param_shapes"][0]["embed.weight"] = torch.Size((7, 13))


def other_steps(found: dict[str, Any]) -> None:
    found["global_steps"] = 77


def without_a_buffer(found: dict[str, Any]) -> None:
    del found["module"]["mean"]


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        (shorter, (1,), "rank_1.*: the params of the groups differ from those in .*rank_0"),
        (shorter, (0, 1), "sub-group 2 is in no parameter group"),
        (without_states, (0,), "rank_1.*: the steps differ"),
        (without_states, (0, 1), "no states of sub-group 1, and has those of others"),
        (without_a_moment, (0, 1), "back.weight has no exp_avg_sq, which embed.weight of the same"),
        (another_step, (1,), "rank_1.*: the steps differ"),
        (a_sub_group_more, (0, 1), "has a sub-group 3, and the model's files name"),
        (other_shapes, (1,), "rank_1.*: param_shapes differ"),
        (other_steps, (1,), "rank_1.*: global_steps differ"),
        (without_a_buffer, (0,), "buffer mean has no value"),
    ],
)
def test_files_of_two_saves_and_files_that_lack_something_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], ranks: tuple[int, ...], said: str
) -> None:
    write_deepspeed(tmp_path, 2, torch.float32)
    of_model = change in (other_shapes, other_steps, without_a_buffer)
    for rank in ranks:
        kind = "model" if of_model else "optim"
        file = tmp_path / TAG / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
        with their_classes():
            found = torch.load(file, weights_only=False)
            change(found if of_model else found["optimizer_state_dict"])
            torch.save(found, file)
    with pytest.raises(ValueError, match=said) as caught:
        read_foreign(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_another_stage_is_refused_with_what_to_do(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 1, torch.float32, stage=2)
    with pytest.raises(ValueError, match=r"ZeRO stage 2; stage 3 is read.*zero_to_fp32.py"):
        read_deepspeed(tmp_path)
    # as DeepSpeed names it in the stages that do not part it
    (whole,) = (tmp_path / TAG).glob("*_model_states.pt")
    whole = whole.rename(tmp_path / TAG / "mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match=r"is not one of ZeRO-3.*zero_to_fp32.py"):
        read_foreign(tmp_path)
    (states,) = (tmp_path / TAG).glob("*_optim_states.pt")
    states.unlink()  # stage 0
    with pytest.raises(NothingSaved, match=f"'{TAG}' was saved by DeepSpeed.*{whole.name}"):
        find(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 100, -40])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write_deepspeed(tmp_path, 1, torch.float32)
    file = tmp_path / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"optim_states.pt: "):
        read_deepspeed(tmp_path)


@pytest.mark.parametrize(
    "key", ["shared_params", "frozen_param_fragments", "buffer_names", "module"]
)
def test_names_that_are_no_strings_are_refused(tmp_path: Path, key: str) -> None:
    write_deepspeed(tmp_path, 1, torch.float32)
    file = tmp_path / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    found = torch.load(file)
    found[key] = (
        [3] if key == "buffer_names" else {3: torch.ones(1)} if key == "module" else [("a", "b")]
    )
    torch.save(found, file)
    with pytest.raises(ValueError, match=f"no model states of ZeRO: {key}"):
        read_deepspeed(tmp_path)


def test_masters_that_were_on_nvme_are_missed(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, 1, torch.float32)
    file = tmp_path / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    found = {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "partition_count": 1,
            "fp32_flat_groups": [torch.empty(0)] * 3,
        }
    }
    torch.save(found, file)
    with pytest.raises(
        ValueError,
        match="the masters of sub-group 0 of rank 0 are not in the file: they were on NVMe",
    ):
        read_deepspeed(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    "TIERMEM_PEER_PYTHON" not in os.environ,
    reason="TIERMEM_PEER_PYTHON names a Python with DeepSpeed",
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_deepspeed_itself_wrote_is_read(
    tmp_path: Path, num_ranks: int, precision: str
) -> None:
    script = Path(__file__).parent / "deepspeed_writes.py"
    command = [
        os.environ["TIERMEM_PEER_PYTHON"],
        "-I",
        str(script),
        str(tmp_path),
        str(num_ranks),
        precision,
    ]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "DS_ACCELERATOR": "cpu"
    }
    done = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(num_ranks)]
    assert [process.wait(300) for process in done] == [0] * num_ranks
    expected = torch.load(tmp_path / "expected.pt")
    found = {p.name: p for p in read_deepspeed(tmp_path / "ds").parameters}
    assert set(found) == {*expected, "seen"}
    for name, states in expected.items():
        read = values_of(found[name])
        assert set(read) == set(states)
        assert all(torch.equal(read[state], value) for state, value in states.items()), name
