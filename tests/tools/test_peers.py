"""Do peers get the same model, data and settings, and is their death a result?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from bench.peers.compare import best_and_defaults
from bench.peers.runs import Peer, _save_tokens, deepspeed_settings, list_peers, peer_command

from tiermem.tools.corpus import Corpus
from tiermem.tools.job.launcher import Job, launch
from tiermem.tools.job.train_job import make_config
from tiermem.tools.memory_limit import open_limit
from tiermem.tools.options import TrainOptions
from tiermem.tools.presets import preset
from tiermem.tools.record.run_record import RunRecord

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def job(folder: Path, **changes: object) -> Job:
    fields: dict[str, object] = {
        "name": "tiny",
        "shape": preset("151m") | TINY | {"num_key_value_heads": 4},
        "checkpoint": None,
        "config": make_config(TrainOptions(lr=1e-3, batch=2, resident_bytes=0), [folder]),
        "data": [],
        "steps": 3,
        "seq": 16,
        "batch": 2,
        "seed": 5,
        "precision": "bf16",
        "is_checkpointing": False,
        "memory_limit_bytes": None,
        "threads": 1,
        "nvme_paths": [str(folder)],
        "events_file": None,
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


def run_plain(
    given: Job, folder: Path, cap_bytes: int | None = None, name: str = "plain"
) -> RunRecord:
    peer = Peer(name, Path(sys.executable), [])
    (folder / "place").mkdir()
    given.save(folder / "place" / "job.json")
    _save_tokens(given, folder / "tokens.npy")
    record = RunRecord()
    setting = list_peers(given, None)[0].settings[0]
    with open_limit(cap_bytes) as limit:
        record.outcome = launch(peer.command(given, setting, folder / "place"), limit, [record])
    return record


@pytest.mark.slow
def test_the_tokens_are_those_our_trainer_draws(tmp_path: Path) -> None:
    given = job(tmp_path)
    _save_tokens(given, tmp_path / "tokens.npy")
    tokens = numpy.load(tmp_path / "tokens.npy")
    assert tokens.shape == (3, 2, 16)
    corpus = Corpus([], 16, 5)
    assert bytes(tokens[1, 0]) == corpus.window(2)
    assert bytes(tokens[2, 1]) == corpus.window(5)


@pytest.mark.slow
def test_plain_pytorch_and_fsdp2_train_alike_and_report(tmp_path: Path) -> None:
    """Also without a GPU, where FSDP2 offloads nothing: both have fp32 masters, and multiply in
    bf16."""
    summaries = {}
    for name in ("plain", "fsdp2"):
        (tmp_path / name).mkdir()
        record = run_plain(job(tmp_path), tmp_path / name, name=name)
        summary = summaries[name] = record.summary()
        assert summary["outcome"] == "finished", (record.outcome, record.error)
        assert len(summary["losses"]) == 3
        assert summary["losses"][2] < summary["losses"][0]
        assert summary["num_params"] == 115_008
        assert summary["threads"] == 1
        assert summary["peak_rss_bytes"] > 100 << 20
    assert summaries["fsdp2"]["losses"] == pytest.approx(summaries["plain"]["losses"], rel=2e-3)


def test_fsdp2_is_a_peer_where_there_is_a_gpu_and_deepspeed_pins_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = job(tmp_path, nvme_paths=[])
    found = {}
    for has_gpu in (False, True):
        monkeypatch.setattr("bench.peers.runs.has_gpu", lambda has_gpu=has_gpu: has_gpu)
        offload = deepspeed_settings(given, tmp_path, uses_nvme=False)[0].values[
            "zero_optimization"
        ]["offload_param"]
        found[has_gpu] = [peer.name for peer in list_peers(given, None)], offload["pin_memory"]
    assert found == {False: (["plain"], False), True: (["plain", "fsdp2"], True)}


def test_a_peer_in_this_interpreter_finds_what_pythonpath_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bare machine has its packages there; an interpreter of its own is isolated as ever."""
    ours, other = Path(sys.executable), Path("/usr/bin/python-of-another")
    monkeypatch.setenv("PYTHONPATH", "/site")
    assert "-I" not in peer_command(ours, "plain") and "-I" in peer_command(other)
    monkeypatch.delenv("PYTHONPATH")
    assert "-I" in peer_command(ours, "plain")


@pytest.mark.slow
def test_a_peer_that_dies_at_the_cap_is_a_result(tmp_path: Path) -> None:
    with open_limit(64 << 20) as limit:
        if limit.kind == "watch":
            pytest.skip(f"no kernel-held cap here: {limit.why}")
    record = run_plain(job(tmp_path), tmp_path, cap_bytes=64 << 20)
    summary = record.summary()
    assert summary["is_killed_at_cap"]
    assert summary["outcome"].startswith("killed at the cap of 64.0 MiB during the imports")


@pytest.mark.usefixtures("forked_python")
def test_an_error_of_a_peer_is_told(tmp_path: Path) -> None:
    record = run_plain(job(tmp_path, shape={"model_type": "no-such-model"}), tmp_path)
    assert record.error is not None
    assert record.error["type"] == "ValueError"
    assert record.summary()["outcome"].startswith("ended with status 1 during building the model")


def test_deepspeed_is_swept_over_homes_and_pipelining(tmp_path: Path) -> None:
    given = job(tmp_path, shape=preset("1.3b"))
    settings = deepspeed_settings(given, tmp_path / "swap", uses_nvme=True)
    assert [s.name for s in settings] == [
        "all-on-nvme",
        "optimizer-on-nvme",
        "optimizer-on-nvme-unpipelined",
        "all-on-cpu-small",
        "optimizer-on-nvme-defaults",
    ]
    assert [s.is_like_ours for s in settings] == [True, True, True, False, True]
    assert [s.name for s in settings if s.is_default] == ["optimizer-on-nvme-defaults"]
    assert list(settings[-1].values) == ["zero_optimization"]  # no buffer, no aio of ours
    buffers = settings[0].values["zero_optimization"]["offload_param"]
    assert buffers["buffer_size"] == 32000 * 2048
    json.dumps([s.values for s in settings])


def test_deepspeed_with_everything_on_the_cpu_runs_with_its_defaults_and_tuned(
    tmp_path: Path,
) -> None:
    """Only a memory cap adds buckets that are smaller than its makers set them."""
    for cap_bytes, small in ((None, []), (1 << 30, ["all-on-cpu-small"])):
        given = job(tmp_path, nvme_paths=[], memory_limit_bytes=cap_bytes)
        settings = deepspeed_settings(given, tmp_path, uses_nvme=False)
        assert [s.name for s in settings] == ["all-on-cpu", "all-on-cpu-large", *small]
        assert [s.is_default for s in settings[:2]] == [True, False]
        assert set(settings[0].values["zero_optimization"]) == {
            "stage",
            "offload_param",
            "offload_optimizer",
        }


def test_swap_folders_are_made_and_removed(tmp_path: Path) -> None:
    swap = tmp_path / "tiermem-peer-1"
    peer = Peer("plain", Path(sys.executable), [], [swap])
    from rich.console import Console

    peer.prepare(job(tmp_path), tmp_path, Console(quiet=True))
    (swap / "left.swp").write_bytes(b"x")
    peer.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "fp16"}, "compares bf16 and fp32"),
        ({"config": {"train_batch_size": 8}}, "train_micro_batch_size_per_gpu"),
        ({"config": {"gradient_accumulation_steps": "auto"}}, "gradient_accumulation_steps"),
    ],
)
def test_a_job_that_peers_cannot_be_given_is_refused(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        list_peers(job(tmp_path, **changes), None)


def test_the_defaults_stand_beside_the_best_however_they_end() -> None:
    def run(name: str, speed: float, **changed: Any) -> dict[str, Any]:
        usual = {"exit_code": 0, "is_like_ours": True, "losses": [1.0], "is_default": False}
        return {"name": name, "tokens_per_s": speed, **usual, **changed}

    slow, fast = run("slow", 1.0), run("fast", 2.0)
    elsewhere = run("elsewhere", 9.0, is_like_ours=False)
    default = run("default", 0.0, exit_code=1, losses=[], is_default=True)
    assert best_and_defaults([slow, default, fast, elsewhere]) == [fast, default]
    assert best_and_defaults([default | {"exit_code": 0}]) == [default | {"exit_code": 0}]
