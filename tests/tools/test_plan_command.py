"""Does `tiermem plan` say what a real start would allocate, whether it fits, and what to change if
not?"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("transformers")

import torch

import tiermem
from tiermem.forecast import Rates, uses_of
from tiermem.forecast.phases import (
    HOST_TO_DEVICE,
    HOST_TO_NVME,
    NVME_TO_HOST,
    RANK_TO_NEAR,
    RANK_TO_RANK,
)
from tiermem.forecast.rates import Compute
from tiermem.policy import OffloadPolicy, Tier
from tiermem.tools.cli import EXIT_USER, main
from tiermem.tools.options import PlanOptions
from tiermem.tools.plan import speed
from tiermem.tools.plan.plan import (
    EXIT_FITS,
    EXIT_TOO_SMALL,
    advise,
    plan,
    scenario_of,
    tiling_hint,
)
from tiermem.tools.plan.planned import Cluster, Planned, Scenario, meta_model, plan_scenario
from tiermem.tools.plan.speed import parse_rates, tuned_speed
from tiermem.tools.presets import ModelSizes, preset
from tiermem.units.unit import divide

TINY = preset("151m") | {
    "hidden_size": 128,
    "intermediate_size": 300,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 301,
}
Speed = tuple[Rates, float]
SPEED: Speed = (Rates(disk_read_bytes_s=1e9, disk_write_bytes_s=0.5e9), 1e12)
GIB = 1 << 30


def config_of(device: str = "nvme", stage: int = 3, **own: Any) -> dict[str, Any]:
    target = {"device": device} | ({"nvme_path": "/mnt/nvme0"} if device == "nvme" else {})
    zero = {"stage": stage, "offload_optimizer": target} | (
        {"offload_param": target} if stage == 3 else {}
    )
    zero["stage3_param_persistence_threshold"] = 200
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True},
        "optimizer": optimizer,
        "zero_optimization": zero,
        "tiermem": own,
    }


def planned(
    config: dict[str, Any],
    cluster: Cluster,
    speed: Speed = SPEED,
    chooses: bool = True,
    **fields: Any,
) -> Planned:
    fields = {"is_configured": True, **fields}
    return plan_scenario(Scenario(TINY, config, cluster, *speed, 64, **fields), chooses)


def made_of_options(scenario: Scenario) -> Scenario:
    return scenario._replace(is_configured=False)


def test_the_papers_table_needs_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--paper"])
    assert not stopped.value.code
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " T " in line]
    assert [row[5:] for row in rows] == [
        ["1.83", "2.03", "0.05", "1.56", "1.63"],
        ["9.16", "3.91", "0.12", "6.25", "2.50"],
        ["18.31", "7.13", "0.20", "9.77", "3.56"],
        ["182.81", "24.38", "0.76", "64.00", "8.00"],
        ["1845.70", "88.59", "3.08", "400.00", "18.00"],
    ]


def test_a_plan_needs_no_config() -> None:
    text = io.StringIO()
    options = PlanOptions(preset="151m", gpu_bytes=24 * GIB, states="compact", batch=2, seq=64)
    assert plan(options, Console(file=text, width=200)) == EXIT_FITS
    said = text.getvalue()
    assert said.startswith("it fits: ") and "2 x 64 tokens" in said
    assert "states rest on DEVICE: " in said  # the best home was chosen
    assert "computing: 1.5e+14 operations a second a rank, assumed: give --flops" in said
    assert "CPU kernels beside copies: 65 GB/s of memory traffic, assumed" in said
    assert "disk: 7 GB/s read, 5 written, both at once, assumed" in said


@pytest.mark.parametrize(
    ("card_mib", "flops", "is_recomputing"), [(4.0, 1e13, True), (64, 1e10, False)]
)
def test_blocks_are_recomputed_where_that_is_faster_or_fits_alone(
    card_mib: float, flops: float, is_recomputing: bool
) -> None:
    speed, cluster = (
        (Rates(1e9, 0.5e9, link_bytes_s=1e9), flops),
        Cluster(1, 1, int(card_mib * (1 << 20)), GIB),
    )
    scenario = Scenario(TINY, config_of("cpu"), cluster, *speed, 64, is_checkpointing=None)
    found = plan_scenario(scenario)
    assert found.activations.is_checkpointing is is_recomputing and not found.problems
    assert found.choice is not None
    said = "blocks are recomputed" if is_recomputing else "blocks keep their activations"
    assert found.choice.reasons[0].startswith(said)
    for is_said in (True, False):
        told = plan_scenario(scenario._replace(is_checkpointing=is_said))
        assert told.activations.is_checkpointing is is_said
        if is_said is is_recomputing:
            assert told.lines == found.lines and told.forecast == found.forecast


def test_on_a_cpu_blocks_are_recomputed_where_a_budget_needs_it_and_without_one_they_are_not() -> (
    None
):
    """Measured maths takes the forward of blocks once more."""
    maths = Compute(1e-9, 2e-9, 0.5, 1.0)

    def within(num_bytes: int | None, told: bool | None = None) -> Planned:
        cluster = Cluster(1, 1, None, num_bytes)
        config = config_of("nvme")
        return plan_scenario(
            Scenario(TINY, config, cluster, SPEED[0], maths, 64, is_checkpointing=told)
        )

    kept = within(None)
    assert not kept.activations.is_checkpointing
    least, enough = 0, GIB
    while enough - least > 1 << 16:
        middle = (least + enough) // 2
        least, enough = (middle, enough) if within(middle, told=False).problems else (least, middle)
    again = within(least)
    assert again.activations.is_checkpointing and not again.problems
    assert again.scenario.compute_of(128, True)[:4] == pytest.approx((1e-9, 3e-9, 0.5, 1.0))


def test_the_plan_is_that_of_a_real_start(tmp_path: Path) -> None:
    import transformers

    config = config_of()
    for section in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][section] = {"device": "nvme", "nvme_path": str(tmp_path)}
    said = planned(config, Cluster(1, 1))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**TINY))
    engine = tiermem.initialize(model=model, config=config)[0]
    assert said.plan.rows == engine.shards.plan.rows
    assert said.num_params == sum(live.numel for _, live in engine.shards.parameters())
    engine.close()


def test_a_budget_of_the_config_is_refused_as_a_start_refuses_it(tmp_path: Path) -> None:
    import transformers

    config = config_of(host_bytes=1 << 20)
    for section in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][section] = {"device": "nvme", "nvme_path": str(tmp_path)}
    (problem,) = planned(config, Cluster(1, 1)).problems
    assert problem.where == "host_bytes of the config" and problem.limit_bytes == 1 << 20
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**TINY))
    with pytest.raises(ValueError, match="smallest plan") as refused:
        tiermem.initialize(model=model, config=config)
    least = int(re.findall(r"needs (\d+) per rank", str(refused.value))[0])
    assert problem.needed_bytes == pytest.approx(least, rel=0.01)
    config["tiermem"]["host_bytes"] = problem.needed_bytes
    assert not planned(config, Cluster(1, 1)).problems
    words = [each.words for each in advise(planned(config_of(host_bytes=1 << 20), Cluster(1, 1)))]
    assert words[0] == "leave tiermem.host_bytes to the plan"


def test_activations_have_what_a_node_leaves_beside_the_configs_budget() -> None:
    """Kept ones do not fit there, so blocks are recomputed."""
    config = config_of(host_bytes=64 << 20)
    kept = planned(config, Cluster(1, 1), is_checkpointing=False)
    again = planned(config, Cluster(1, 1), is_checkpointing=True)
    sizes = [each.tier_bytes(Tier.HOST) for each in (again, kept)]
    assert sizes[0] < sizes[1]
    found = planned(config, Cluster(1, 1, None, sum(sizes) // 2), is_checkpointing=None)
    assert found.activations.is_checkpointing and not found.problems
    assert found.policy.host_bytes == 64 << 20


def test_homes_that_are_auto_in_a_config_are_chosen(tmp_path: Path) -> None:
    config = config_of()
    for section in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][section]["device"] = "auto"
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    options = PlanOptions(
        config=file, model=model, gpu_bytes=24 * GIB, seq=64, nvme_rate="3,3", flops=1e12
    )
    scenario, _ = scenario_of(options)
    found = plan_scenario(scenario)
    assert found.policy.optim is Tier.DEVICE and found.policy.params is Tier.DEVICE
    small = scenario.cluster._replace(gpu_bytes=700 << 20, host_bytes=480 << 20)
    found = plan_scenario(scenario._replace(cluster=small))
    assert found.policy.optim is not Tier.DEVICE
    assert not [each for each in advise(found) if "homes" in each.words]


def test_a_node_is_shared_and_every_rank_holds_its_part() -> None:
    one, many = (
        planned(config_of(), Cluster(1, 1)),
        planned(config_of(), Cluster(num_nodes=3, ranks_per_node=2)),
    )
    # shards are padded
    assert many.tier_bytes(Tier.NVME) == pytest.approx(one.tier_bytes(Tier.NVME) / 6, rel=0.15)
    assert many.forecast.edge_bytes(RANK_TO_RANK) > 0 == one.forecast.edge_bytes(RANK_TO_RANK)
    slower = (Rates(disk_read_bytes_s=5e8, disk_write_bytes_s=2.5e8), 1e12)
    halved = planned(config_of(), Cluster(3, 1), slower)
    two = planned(config_of(), Cluster(3, 2))
    assert two.forecast.limits_s["disk"] == pytest.approx(
        halved.forecast.limits_s["disk"] / 2, rel=0.1
    )


def test_a_slow_network_is_what_limits() -> None:
    slow = Rates(1e9, 1e9, network_bytes_s=1e6), 1e12
    found = planned(config_of("cpu"), Cluster(2, 2), slow).forecast
    assert found.limited_by == "network"
    assert found.limits_s["link"] == max(found.limits_s.values())


def test_mics_keeps_a_copy_in_every_group() -> None:
    config = config_of()
    config["zero_optimization"]["mics_shard_size"] = 2
    groups, pair, all_six = (
        planned(config, Cluster(3, 2)),
        planned(config_of(), Cluster(1, 2)),
        planned(config_of(), Cluster(3, 2)),
    )
    assert groups.plan.rows == pair.plan.rows != all_six.plan.rows
    forward = [
        each.forecast.moved_bytes[RANK_TO_RANK]["forward"] for each in (groups, pair, all_six)
    ]
    assert forward[0] == forward[1] < forward[2]  # nobody is asked outside the group
    config["zero_optimization"]["mics_shard_size"] = 4
    with pytest.raises(
        ValueError, match=r"mics_shard_size in a config\) does not divide the 6 data-parallel ranks"
    ):
        planned(config, Cluster(3, 2))


def test_a_gpu_adds_its_edges_and_takes_the_activations() -> None:
    said = planned(config_of(), Cluster(1, 2, gpu_bytes=8 * GIB))
    assert said.forecast.edge_bytes(HOST_TO_DEVICE) > 0
    tiers = {line.what: line.tier for line in said.lines}
    assert tiers["activations"] is Tier.DEVICE
    assert said.pinned_bytes == said.plan.link_bytes > 0
    assert planned(config_of(), Cluster(1, 2)).pinned_bytes == 0
    assert "allocator" not in tiers
    whole = planned(config_of("none"), Cluster(1, 2, gpu_bytes=8 * GIB))
    assert {line.what: line.tier for line in whole.lines}["optimizer states"] is Tier.DEVICE
    # which has activations and units present beside it
    assert whole.plan.device_bytes < whole.tier_bytes(Tier.DEVICE)


def test_memory_that_is_left_holds_states_and_saves_their_reads() -> None:
    free = planned(config_of(resident_bytes=0), Cluster(1, 1))
    roomy = planned(config_of(), Cluster(1, 1, host_bytes=2 * GIB), chooses=False)
    saved = free.forecast.edge_bytes(NVME_TO_HOST) - roomy.forecast.edge_bytes(NVME_TO_HOST)
    written = free.forecast.edge_bytes(HOST_TO_NVME) - roomy.forecast.edge_bytes(HOST_TO_NVME)
    assert saved == written > 0
    assert roomy.tier_bytes(Tier.HOST) <= 2 * GIB
    assert not roomy.problems


def test_memory_that_is_left_holds_what_is_predicted_to_save_most() -> None:
    by_rule = planned(config_of(), Cluster(1, 1, host_bytes=2 * GIB), chooses=False)
    chosen = planned(config_of(), Cluster(1, 1, host_bytes=2 * GIB))
    assert chosen.choice is not None and chosen.choice.reasons
    assert chosen.policy.host_param_numel
    assert chosen.forecast.total_s < by_rule.forecast.total_s
    assert not chosen.problems


def test_what_does_not_fit_names_the_tier_and_what_changes_it() -> None:
    said = planned(config_of("cpu"), Cluster(1, 1, host_bytes=450 << 20))
    need = planned(config_of("cpu"), Cluster(1, 1)).tier_bytes(Tier.HOST)
    tight = planned(config_of("cpu"), Cluster(1, 1, host_bytes=need - (2 << 20)))
    (problem,) = tight.problems
    assert (problem.where, problem.limit_bytes) == ("the memory of a node", need - (2 << 20))
    advice = advise(tight)
    assert advice
    assert all(each.fits for each in advice)
    by_options = advise(tight._replace(scenario=made_of_options(tight.scenario)))
    assert "--states tiny (smaller states)" in {each.words for each in by_options}
    assert 'tiermem.precision "tiny" (smaller states)' in {each.words for each in advice}
    rates = [each.planned.tokens_per_s for each in advice]
    assert rates == sorted(rates, reverse=True)
    assert said.forecast.total_s > 0


def test_a_disk_that_is_the_bound_suggests_more_disks() -> None:
    slow = (Rates(disk_read_bytes_s=1e7, disk_write_bytes_s=1e7), 1e13)
    said = planned(config_of(resident_bytes=0), Cluster(1, 1), slow)
    assert said.forecast.limited_by == said.forecast.bound_of("forward") == "disk"
    words = {
        each.words: each.planned.tokens_per_s / said.tokens_per_s for each in advise(said, most=20)
    }
    assert words["twice the NVMe paths"] == pytest.approx(2, rel=0.1)
    assert words['tiermem.precision "compact" (smaller states)'] > 1.4


def test_a_unit_larger_than_the_rest_names_tiled_linear() -> None:
    shape = TINY | {"vocab_size": 300_000}
    said = plan_scenario(
        Scenario(shape, config_of(), Cluster(1, 1, gpu_bytes=150 << 20), *SPEED, 8)
    )
    hint = tiling_hint(said)
    assert hint is not None
    assert "replace its Linear by tiermem.zero.TiledLinear" in hint


def test_meta_models_take_no_memory() -> None:
    assert all(
        param.is_meta and param.dtype == torch.bfloat16
        for param in meta_model(preset("7b"), "bf16").parameters()
    )


def test_a_disk_too_small_for_two_slots_is_told_what_one_needs() -> None:
    two = planned(config_of(), Cluster(1, 1))
    one = planned(config_of(durability="none"), Cluster(1, 1))
    assert one.plan.durable_disk_bytes == 0 < two.plan.durable_disk_bytes
    assert two.tier_bytes(Tier.NVME) - one.tier_bytes(Tier.NVME) == two.plan.durable_disk_bytes
    rows = {line.what: line.num_bytes for line in two.lines if line.tier is Tier.NVME}
    assert rows["frozen slots"] == rows["parameters"] + rows["optimizer states"]
    room = one.tier_bytes(Tier.NVME) - one.plan.attempt_disk_bytes
    short = planned(config_of(), Cluster(1, 1, nvme_bytes=room))
    assert [problem.where for problem in short.problems] == ["the disks of a node"]
    assert any("tiermem.durability" in each.words and each.fits for each in advise(short, most=20))
    for own in ({}, {"disk_bytes": 1 << 40}):  # a machine without a disk
        none = planned(config_of(**own), Cluster(1, 1, nvme_bytes=0))
        assert [problem.where for problem in none.problems] == ["the disks of a node"]


def test_a_second_copy_near_by_pays_where_the_near_network_is_faster() -> None:
    rates = dataclasses.replace(SPEED[0], network_bytes_s=1e8, near_bytes_s=1e10)
    cluster, speed = Cluster(num_nodes=2, ranks_per_node=2), (rates, 1e15)
    plain, second = config_of("cpu"), config_of("cpu")
    second["zero_optimization"]["zero_hpz_partition_size"] = 2
    far, near = planned(plain, cluster, speed), planned(second, cluster, speed)
    assert near.forecast.edge_bytes(RANK_TO_NEAR) > 0 == far.forecast.edge_bytes(RANK_TO_NEAR)
    assert near.forecast.edge_bytes(RANK_TO_RANK) < far.forecast.edge_bytes(RANK_TO_RANK)
    assert near.forecast.total_s < far.forecast.total_s


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(config_of()))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def run(files: Path, **fields: Any) -> tuple[int, str]:
    text = io.StringIO()
    given = {
        "config": files / "ds.json",
        "model": files / "config.json",
        "seq": 64,
        "nvme_rate": "1,0.5",
        "flops": 1e12,
    }
    return plan(
        PlanOptions(**(given | fields)), Console(file=text, width=160, markup=False)
    ), text.getvalue()


def test_the_report_and_its_json_say_the_same(files: Path) -> None:
    status, said = run(files, ranks=2, nodes=3, host_bytes=64 * GIB, json_file=files / "out.json")
    out = json.loads((files / "out.json").read_text())
    assert status == EXIT_FITS
    assert "on 6 ranks: 3 x 2, maths on CPUs" in said
    assert "it fits" in said
    assert "disk: given by --nvme-rate" in out["sources"]
    for phase, seconds in out["seconds"].items():
        assert f"{phase}" in said and f"{seconds:.3f}" in said
    assert out["choice"].startswith("planned by ") and " ".join(out["choice"].split()[:6]) in said
    assert out["moved_bytes"][RANK_TO_RANK].keys() == {"forward", "backward", "step"}
    frozen = [line["num_bytes"] for line in out["lines"] if line["what"] == "frozen slots"]
    assert out["frozen_disk_bytes"] == sum(frozen)
    assert ("with durability='none'" in said) == bool(frozen)
    assert out["node_bytes"]["NVME"] == 2 * out["rank_bytes"]["NVME"]


def test_too_small_is_exit_1_with_what_to_change(files: Path) -> None:
    status, said = run(
        files, model=None, preset="151m", host_bytes=380 << 20, json_file=files / "out.json"
    )
    assert status == EXIT_TOO_SMALL
    assert "does not fit: the memory of a node has 0.37 GiB and" in said
    assert "what to change or buy:" in said
    assert not json.loads((files / "out.json").read_text())["fits"]


def test_this_machine_is_measured_when_no_speed_is_given(files: Path) -> None:
    status, said = run(files, flops=None)
    assert status == EXIT_FITS
    assert "computing: a few of the model's blocks, trained for a moment on this machine" in said


def test_maths_that_would_take_minutes_to_time_is_told_by_products(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "measure_flops", lambda *given: 1e6)
    monkeypatch.setattr(speed, "measure_maths", None)
    status, said = run(files, flops=None)
    assert status == EXIT_FITS
    assert "computing: 1e+06 operations a second, in products of matrices" in said
    assert "limited by compute" in said


def test_steps_begin_under_backward_only_where_the_disk_has_room() -> None:
    found = planned(config_of(), Cluster(1, 1))
    slot = found.plan.attempt_disk_bytes
    assert 14 * found.num_params <= slot < 15 * found.num_params
    for room, own in (
        (found.tier_bytes(Tier.NVME) - 1, {}),
        (None, {"disk_bytes": found.plan.disk_bytes - 1}),
    ):
        less = planned(config_of(**own), Cluster(1, 1, nvme_bytes=room))
        assert less.plan.attempt_disk_bytes == 0 and not less.problems
        assert less.tier_bytes(Tier.NVME) == found.tier_bytes(Tier.NVME) - slot


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("states", "element_ns"), [("exact", 0.0084), ("compact", 0.0066), ("tiny", 0.0065)]
)
def test_a_card_that_is_not_here_steps_as_the_kernel_does(
    files: Path, states: str, element_ns: float
) -> None:
    words = {
        "model": None,
        "preset": "8b",
        "offload": "none",
        "states": states,
        "gpu_bytes": 200 << 30,
        "seq": 512,
    }
    fields = {
        "gpu_memory_bytes_s": 4.8e12,
        "flops": 4e14,
        "is_checkpointing": True,
        "nvme_rate": None,
        "config": None,
    }
    run(files, **words, **fields, json_file=files / "out.json")
    figures = json.loads((files / "out.json").read_text())
    expected = figures["num_params"] * element_ns * 1e-9
    # Python issues the tiles of small units
    assert figures["seconds"]["step"] == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
def test_the_link_is_given_measured_or_assumed(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"gpu_bytes": 24 << 30}
    assert "GPU: 25 GB/s each way, assumed: give --link" in run(files, **fields)[1]
    assert "GPU: 11 GB/s each way, by --link" in run(files, link_bytes_s=11e9, **fields)[1]
    monkeypatch.setattr("tiermem.tools.plan.speed.measure_link", lambda device: 13.24e9)
    assert "GPU: 13.2 GB/s each way, measured here with pinned memory" in run(files, **fields)[1]
    assert "GPU: 11 GB/s each way, by --link" in run(files, link_bytes_s=11e9, **fields)[1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"preset": "7b"}, "exactly one of --preset and --model; both are given"),
        ({"model": None}, "exactly one of --preset and --model; none is given"),
        ({"ranks": 0}, "--ranks is 0; it must be at least 1"),
        ({"offload": "cpu", "batch": 2}, "--offload, --batch: --config decides this"),
        ({"rates": Path("tiermem.json")}, "--nvme-rate and --rates both say how fast"),
        ({"nvme_rate": "3.6"}, "--nvme-rate is '3.6'; write two rates in GB/s"),
        ({"nvme_rate": "3.6,-1"}, "--nvme-rate is '3.6,-1'; write two rates in GB/s"),
        ({"nvme_rate": "inf,1"}, "--nvme-rate is 'inf,1'; write two rates in GB/s"),
    ],
)
def test_mistakes_say_what_is_allowed(files: Path, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        run(files, **fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 in the model's config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
        (
            {"model_type": "mixtral", "num_local_experts": 0},
            "mlp.experts.gate_up_proj of this mixtral has no experts: give it some",
        ),
        ({"model_type": "t5"}, 'name the class of the model under "architectures" in its config'),
        (
            {"model_type": "t5", "architectures": ["T5EncoderModel"], "vocab_size": None},
            "config has no vocab_size, which the arithmetic of activations needs",
        ),
        ({"pad_token_id": 5000}, "no llama can be built of the model's config: AssertionError: P"),
        ({"hidden_act": "nope"}, "no llama can be built of the model's config: KeyError: 'nope'"),
        ({"tie_word_embeddings": "yes"}, "expected bool, got str"),
        ({"model_type": "llama2"}, "model_type is 'llama2', which this transformers does not know"),
    ],
)
def test_a_config_of_which_no_model_can_be_built_is_refused_in_one_line(
    fields: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY | fields))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", str(file), "--gpu", "4090", "--nvme-rate", "1,1"])
    assert ended.value.code == EXIT_USER
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("tiermem plan: ") and reason in said and len(said) < 300


def test_the_command_refuses_in_one_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "plan",
                "--config",
                str(files / "ds.json"),
                "--model",
                str(files / "nothing"),
                "--flops",
                "1T",
            ]
        )
    assert stopped.value.code == EXIT_USER
    assert "tiermem plan: --model: there is no file" in capsys.readouterr().err


def test_rates_in_gb_s() -> None:
    assert parse_rates("3.6,7.0") == (3.6e9, 7.0e9)


def test_tuned_rates_are_taken_apart(tmp_path: Path) -> None:
    file = tmp_path / "tiermem.json"
    facts = {"mixed_gbps": [2.0, 2.0], "read_gbps": [1.5, 1.5]}
    measured = {"is_default_kept": False, "winner": facts, "default": {}}
    file.write_text(json.dumps({"aio": {}, "tiermem": {"measured": measured}}))
    shared, _ = tuned_speed(file)
    assert not shared.is_disk_duplex
    assert 2 / (1 / shared.disk_read_bytes_s + 1 / shared.disk_write_bytes_s) == pytest.approx(
        4e9
    )  # half of the bytes each way
    facts["read_gbps"] = [1.2, 1.2]
    file.write_text(json.dumps({"aio": {}, "tiermem": {"measured": measured}}))
    assert tuned_speed(file) == (Rates(2.4e9, 2e9, is_disk_duplex=True), f"disk: from {file}")
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"holds no rates; it must be what `tiermem tune` wrote"):
        tuned_speed(file)


MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 999,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "use_cache": False,
}


def test_a_mixtures_sizes_are_those_of_its_model() -> None:
    sizes = ModelSizes.of(MIXTURE)
    model: Any = meta_model(MIXTURE, "bf16")
    block = sum(param.numel() for param in model.model.layers[0].parameters())
    assert sizes.block_numel == pytest.approx(block, rel=0.05)  # without router and norms of heads
    assert sizes.intermediate == 2 * 32
    assert max(p.numel() for p in model.parameters()) == sizes.weight_numel


def test_a_batch_reads_the_experts_that_it_is_expected_to_use() -> None:
    shape = MIXTURE | {"num_hidden_layers": 16}  # more than buffers hold

    def read_bytes(seq: int) -> int:
        config = config_of() | {"train_micro_batch_size_per_gpu": 1}
        scenario = Scenario(shape, config, Cluster(1, 1), *SPEED, seq)
        return plan_scenario(scenario, chooses=False).forecast.moved_bytes["NVME -> HOST"][
            "forward"
        ]

    # of 64 experts two tokens are expected to use 3.9, twenty 29.9 and thirty 38.9: all then
    few, some, many, most = (read_bytes(seq) for seq in (2, 20, 30, 500))
    assert few == pytest.approx(0.1 * most, rel=0.1)
    assert some == pytest.approx(0.5 * most, rel=0.1)
    assert many == most


def test_a_tokens_maths_is_that_of_the_experts_that_it_chooses() -> None:
    model: Any = meta_model(MIXTURE, "bf16")
    division = divide(model, OffloadPolicy(), 1)
    numel = sum(use.forward_s for use in uses_of(model, division, Compute(1.0, 1.0)))
    embedding = model.get_input_embeddings().weight.numel()
    matrices = sum(param.numel() for param in model.parameters() if param.dim() == 2) - embedding
    fused = sum(param.numel() for param in model.parameters() if param.dim() > 2)
    assert numel == matrices + fused * 2 // 64


def test_adapters_over_frozen_blocks_are_planned(
    files: Path, recwarn: pytest.WarningsRecorder
) -> None:
    pytest.importorskip("peft")
    (files / "config.json").write_text(json.dumps(MIXTURE))
    given = ["plan", "--model", str(files), "--offload", "nvme"]
    given += ["--flops", "1T", "--nvme-rate", "1,1", "--seq", "64"]
    found = {}
    for name, more in (("all", []), ("adapters", ["--lora", "4", "--frozen", "nf4"])):
        with pytest.raises(SystemExit) as stopped:
            main([*given, *more, "--json", str(files / "plan.json")])
        assert not stopped.value.code
        found[name] = json.loads((files / "plan.json").read_text())
    assert not [str(each.message) for each in recwarn]  # of PEFT and transformers
    trained = found["adapters"]["num_params"] - found["all"]["num_params"]
    assert trained == 2 * 4 * (64 + 64 + 2 * (64 + 32) + 64 + 64)  # q, k and v, o of two layers
    rows = {name: {row["what"]: row for row in each["lines"]} for name, each in found.items()}
    assert rows["all"]["gradients in autograd"]["num_bytes"]
    assert not rows["adapters"]["gradients in autograd"]["num_bytes"]
    assert (
        rows["adapters"]["parameters"]["num_bytes"] < 0.5 * rows["all"]["parameters"]["num_bytes"]
    )
    assert any("expected to use" in each for each in found["all"]["placement"])
