"""Does a key of the config change what a run does: its bytes, its steps, its lines of progress?

One test for each key or family whose effect no other file looks at; tests/config/test_every_key.py
says which key is looked at where.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from config_keys import catalogue
from programs import models
from programs.twins import loss_of, seeded, train_engine, weights_of
from torch import nn

import tiermem

NVME = "nvme"


@contextmanager
def engine_of(
    folder: Path, zero: dict[str, Any] | None = None, **sections: Any
) -> Iterator[tiermem.Engine]:
    """An engine of a small model under a config; closed in the end."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 50, **(zero or {})},
    }
    model = sections.pop("model", None) or seeded(models.ShortTower)
    engine, _, _, _ = tiermem.initialize(model=model, config=config | sections)
    try:
        yield engine
    finally:
        engine.close()


def offloaded(folder: Path, param: dict[str, Any] | None = None, **optim: Any) -> dict[str, Any]:
    """Both offload sections on nvme, with further keys."""
    nvme = {"device": NVME, "nvme_path": str(folder)}
    return {"offload_param": nvme | (param or {}), "offload_optimizer": nvme | optim}


def train(engine: tiermem.Engine, num_steps: int = 1) -> None:
    train_engine(engine, range(num_steps * engine.gradient_accumulation_steps()))


# ---- the top of the config -----------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(**keys: Any) -> Any:
    config = {"zero_optimization": {"stage": 3}, **keys}
    engine, _, loader, _ = tiermem.initialize(
        model=models.ShortTower(), config=config, training_data=Numbers()
    )
    engine.close()
    return loader


@pytest.mark.parametrize(
    "sizes",
    [
        {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
        {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 3},
        {"train_batch_size": 6, "gradient_accumulation_steps": 2},
    ],
)
def test_any_two_batch_sizes_give_micro_batches_and_steps(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    assert [len(batch) for batch in loader_of(**sizes)] == [3, 3, 3, 2]
    config = {"optimizer": {"type": "SGD"}, **sizes}
    engine, _, _, _ = tiermem.initialize(model=seeded(models.ShortTower), config=config)
    assert engine.train_batch_size() == 6
    train_engine(engine, range(4))
    assert engine.global_steps == 2
    engine.close()


def test_dataloader_drop_last_leaves_out_the_batch_that_is_not_full() -> None:
    assert len(loader_of(train_micro_batch_size_per_gpu=3, dataloader_drop_last=True)) == 3


def test_seed_decides_the_order_of_training_data() -> None:
    orders = [
        torch.cat(list(loader_of(train_micro_batch_size_per_gpu=3, seed=seed))).tolist()
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(11))


def test_gradient_clipping_bounds_the_step(tmp_path: Path) -> None:
    for clip in (0.0, 0.25):
        sgd = {"type": "SGD", "params": {"lr": 1.0}}
        with engine_of(tmp_path, gradient_clipping=clip, optimizer=sgd) as engine:
            before = weights_of(engine.module)
            train(engine)
            moved = torch.cat(
                [
                    (value - before[name]).flatten()
                    for name, value in weights_of(engine.module).items()
                ]
            ).norm()
            assert engine.get_global_grad_norm() > 0.25
            assert moved.item() == pytest.approx(clip or engine.get_global_grad_norm(), rel=1e-3)


@pytest.mark.parametrize(
    ("every", "steps"), [(2, [2, 4]), (1, [1, 2, 3, 4, 5]), (0, []), (None, [])]
)
def test_steps_per_print_spaces_the_lines_of_progress(
    every: int | None, steps: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "tiermem"),
        engine_of(tmp_path, steps_per_print=every) as engine,
    ):
        train(engine, 5)
    lines = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")
    ]
    assert [int(line.split()[1].rstrip(",")) for line in lines] == steps


@pytest.mark.parametrize("is_on", [True, False])
def test_wall_clock_breakdown_adds_the_phases_to_a_line_of_progress(
    is_on: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"steps_per_print": 2, "wall_clock_breakdown": is_on}
    with caplog.at_level(logging.INFO, "tiermem"), engine_of(tmp_path, **keys) as engine:
        train(engine, 4)
    lines = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")
    ]
    assert len(lines) == 2
    for line in lines:
        assert all((f", {phase} " in line) == is_on for phase in ("forward", "backward", "step"))
        assert ("ms" in line) == is_on


@pytest.mark.parametrize("is_on", [True, False])
def test_dump_state_logs_every_key_at_the_start(
    is_on: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "tiermem"),
        engine_of(tmp_path, dump_state=is_on, seed=7) as engine,
    ):
        rows = engine.config.report()
    logged = [record.getMessage() for record in caplog.records]
    assert ("seed = 7 (honoured)" in logged) == is_on
    assert sum(str(row) in logged for row in rows) == (len(rows) if is_on else 0)


def test_buffer_dtype_casts_floating_point_buffers_alone(tmp_path: Path) -> None:
    for given, expected in ((None, torch.float32), ("bf16", torch.bfloat16)):
        model = seeded(models.ShortTower)
        model.register_buffer("frequencies", torch.rand(5))
        model.register_buffer("places", torch.arange(5))
        with engine_of(
            tmp_path, model=model, bf16={"enabled": True}, data_types={"buffer_dtype": given}
        ):
            assert model.frequencies.dtype is expected
            assert model.places.dtype is torch.int64


class Biased(models.ShortTower):
    """Lists what stays in fp32, as a class of transformers does."""

    _keep_in_fp32_modules_strict = ("router.*_bias",)
    _keep_in_fp32_modules = frozenset({"scale"})

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Module()
        self.router.register_buffer("score_bias", torch.zeros(5))
        self.router.register_buffer("count", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("scale", torch.ones(5))


@pytest.mark.parametrize("section", ["bf16", "fp16"])
@pytest.mark.parametrize("is_built_inside", [False, True])
@pytest.mark.parametrize("names", ["auto", ["sca*e"], []])
def test_listed_buffers_are_fp32(
    names: Any, is_built_inside: bool, section: str, tmp_path: Path
) -> None:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[section]
    kept = {"auto": {"router.score_bias", "scale"} if section == "fp16" else {"router.score_bias"}}
    sections = {
        section: {"enabled": True},
        "data_types": {"buffer_dtype": section, "keep_in_fp32_modules": names},
    }
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, **sections}
    with tiermem.zero.Init(config_dict_or_path=config, enabled=is_built_inside):
        model = nn.Sequential(Biased())
        before = model[0].scale.dtype
        for buffer in model.buffers():
            buffer.data = buffer.data.to(half) if buffer.is_floating_point() else buffer.data
    assert before is torch.float32
    expected = kept.get(str(names)) or ({"scale"} if names else set())
    dtypes = {
        name: each.dtype for name, each in model[0].named_buffers() if each.is_floating_point()
    }
    assert {name for name, each in dtypes.items() if each is torch.float32} == (
        expected if is_built_inside else set()
    )
    with engine_of(tmp_path, model=model, **sections):
        dtypes = {
            name: each.dtype for name, each in model[0].named_buffers() if each.is_floating_point()
        }
    assert dtypes == {
        name: torch.float32 if name in expected else half for name in ("router.score_bias", "scale")
    }


class Features(nn.Module):
    """A model of floating-point inputs, which says in what dtype they came."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, mask: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen = x.dtype, mask["keep"].dtype, mask["weight"].dtype
        return self.head(x.to(self.head.weight.dtype))


@pytest.mark.parametrize("is_on", [True, False])
def test_auto_cast_gives_the_model_fp16_inputs(is_on: bool, tmp_path: Path) -> None:
    fp16 = {"enabled": True, "auto_cast": is_on}
    with engine_of(tmp_path, model=Features(), fp16=fp16) as engine:
        mask = {"keep": torch.ones(2, dtype=torch.bool), "weight": torch.rand(2)}
        engine(torch.rand(2, 7), mask=mask)
        dtype = torch.float16 if is_on else torch.float32
        assert engine.module.seen == (dtype, torch.bool, dtype)


def test_a_scheduler_by_name_changes_the_rate_of_each_step(tmp_path: Path) -> None:
    params = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.5,
        "warmup_num_steps": 2,
        "warmup_type": "linear",
    }
    with engine_of(tmp_path, scheduler={"type": "WarmupLR", "params": params}) as engine:
        rates = []
        for step in range(4):
            rates += engine.get_lr()
            train_engine(engine, [step])
    assert rates == [0.0, 0.0, 0.25, 0.5]


FLIPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Adam": (
        {"lr": 1e-2, "weight_decay": 0.1},
        {
            "lr": 1e-3,
            "weight_decay": 0.5,
            "betas": [0.5, 0.7],
            "eps": 0.1,
            "amsgrad": True,
            "maximize": True,
            "adam_w_mode": False,
        },
    ),
    "Adagrad": (
        {"lr": 1e-2},
        {
            "lr": 1e-3,
            "weight_decay": 0.5,
            "lr_decay": 0.5,
            "initial_accumulator_value": 0.1,
            "eps": 0.1,
            "maximize": True,
        },
    ),
    "Lion": (
        {"lr": 1e-2},
        {"lr": 1e-3, "weight_decay": 0.5, "betas": [0.1, 0.5], "maximize": True},
    ),
    "SGD": (
        {"lr": 1e-2, "momentum": 0.9},
        {
            "lr": 1e-3,
            "weight_decay": 0.5,
            "momentum": 0.5,
            "dampening": 0.5,
            "nesterov": True,
            "maximize": True,
        },
    ),
    "Muon": (
        {"lr": 1e-2},
        {
            "lr": 1e-3,
            "weight_decay": 0.5,
            "momentum": 0.5,
            "nesterov": False,
            "ns_steps": 2,
            "betas": [0.5, 0.7],
            "eps": 0.1,
            "muon_lr": 0.1,
            "adam_lr": 0.1,
        },
    ),
}  # settings of an optimizer, and for each another value


def test_every_setting_of_every_optimizer_is_flipped_below() -> None:
    """All but those about what states are kept in, one that is a default of another, and those that
    are refused or computed."""
    rows = {
        (s.title, k.path.rpartition(".")[2])
        for s in catalogue()
        for k in s.keys
        if k.fate == "honoured"
    }
    for name, (_, flips) in FLIPS.items():
        title = f"optimizer.params of {name}{' and AdamW' if name == 'Adam' else ''}"
        seen_elsewhere = {"fp32_optimizer_states", "torch_adam"}
        assert {key for where, key in rows if where == title} - seen_elsewhere == set(flips)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FLIPS)
def test_a_setting_of_an_optimizer_changes_the_weights(name: str, tmp_path: Path) -> None:
    def trained(params: dict[str, Any]) -> torch.Tensor:
        with engine_of(tmp_path, optimizer={"type": name, "params": params}) as engine:
            train(engine, 4)
            return torch.cat([value.flatten() for value in weights_of(engine.module).values()])

    before = trained(FLIPS[name][0])
    unchanged = [
        k
        for k, value in FLIPS[name][1].items()
        if torch.equal(before, trained(FLIPS[name][0] | {k: value}))
    ]
    assert not unchanged


# ---- zero_optimization ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload_param": True}, {"offload_param": {"device": "cpu"}}),
        (
            {"cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False},
            {
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "offload_param": {"device": "cpu", "pin_memory": False},
            },
        ),
        (
            {"stage3_gather_fp16_weights_on_model_save": True},
            {"stage3_gather_16bit_weights_on_model_save": True},
        ),
    ],
)
def test_a_deprecated_key_plans_and_runs_as_its_successor(
    old: dict[str, Any], new: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for zero in (old, new):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if zero is new else "ignore", DeprecationWarning)
            with engine_of(tmp_path, zero) as engine:
                train(engine)
                found.append(
                    (
                        engine.shards.policy,
                        engine.shards.plan.rows,
                        weights_of(engine.module)["head.weight"].tolist(),
                    )
                )
    assert found[0] == found[1]


def test_masters_are_loaded_or_made_from_the_weights_as_load_from_fp32_weights_says(
    tmp_path: Path,
) -> None:
    masters = []
    for loads in (True, False):
        keys = {"load_from_fp32_weights": loads, "offload_optimizer": {"device": "cpu"}}
        adam = {"type": "AdamW", "params": {"lr": 1e-4}}
        with engine_of(tmp_path, keys, bf16={"enabled": True}, optimizer=adam) as engine:
            train(engine, 3)
            assert engine.optimizer is not None
            saved = engine.optimizer.state_dict()
            engine.optimizer.load_state_dict(saved)
            loaded = engine.optimizer.state_dict()["state"][0]["master"]
            masters.append(
                (saved["state"][0]["master"], loaded, weights_of(engine.module)["embed.weight"])
            )
    kept, made = masters
    assert torch.equal(kept[0], made[0])  # the same run so far
    assert torch.equal(kept[1], kept[0])
    assert torch.equal(made[1], made[2].float())
    assert not torch.equal(made[1], made[0])


def test_parameter_buffers_on_nvme_are_as_many_as_buffer_count(tmp_path: Path) -> None:
    for count in (2, 4):
        with engine_of(
            tmp_path, offloaded(tmp_path, {"buffer_count": count}), tiermem={"strict": True}
        ) as engine:
            assert engine.shards.plan.units.num == count


def test_a_unit_larger_than_buffer_size_is_refused(tmp_path: Path) -> None:
    zero, strict = offloaded(tmp_path, {"buffer_size": 1000}), {"strict": True}
    with pytest.raises(ValueError, match="unit"), engine_of(tmp_path, zero, tiermem=strict):
        pass
    with engine_of(
        tmp_path, offloaded(tmp_path, {"buffer_size": 100_000}), tiermem=strict
    ) as engine:
        assert engine.shards.plan.units.slot_bytes <= 400_000


def test_max_in_cpu_keeps_parameters_off_the_disk(tmp_path: Path) -> None:
    read_bytes = []
    for numel in (0, 10_000, 1_000_000):
        with engine_of(
            tmp_path, offloaded(tmp_path, {"max_in_cpu": numel}, device="cpu")
        ) as engine:
            train(engine, 2)
            read_bytes.append(engine.shards.store.stats().nvme_read_bytes)
    assert read_bytes[0] > read_bytes[1] > read_bytes[2] == 0


@pytest.mark.parametrize(("count", "tiles"), [(4, 1), (8, 2), (12, 3)])
def test_four_optimizer_buffers_hold_one_tile(count: int, tiles: int, tmp_path: Path) -> None:
    with engine_of(
        tmp_path, offloaded(tmp_path, buffer_count=count), tiermem={"strict": True}
    ) as engine:
        assert engine.shards.plan.tiles.num == tiles


def test_small_numbers_are_least_where_memory_allows_more(tmp_path: Path) -> None:
    """As DeepSpeed's own examples give them; what is trained is the same."""
    zero = {**offloaded(tmp_path, {"buffer_count": 2}, buffer_count=4), "sub_group_size": 4096}
    found, weights = [], []
    with engine_of(tmp_path, offloaded(tmp_path, {"buffer_size": 1000})) as engine:
        assert engine.shards.plan.units.slot_bytes > 4000
    for own in ({}, {"host_bytes": 4_600_000}, {"sizes_are_least": False}):
        with engine_of(tmp_path, zero, tiermem=own) as engine:
            train(engine, 2)
            plan = engine.shards.plan
            found.append((plan.tiles.num, plan.units.num, plan.choice.tile_numel))
            weights.append(weights_of(engine.module))
    usual, small, least = found
    assert usual == (8, 3, 1 << 20)
    assert least == (1, 2, 4096)
    assert all(each >= size for each, size in zip(small, least, strict=True)) and small < usual
    for other in weights[1:]:
        assert all(torch.equal(other[name], value) for name, value in weights[0].items())


@pytest.mark.parametrize("key", ["pipeline_read", "pipeline_write"])
def test_a_pipeline_that_is_off_takes_fewer_buffers_and_ends_each_tile_first(
    key: str, tmp_path: Path
) -> None:
    slots = []
    for is_on in (True, False):
        zero = {**offloaded(tmp_path, **{key: is_on}), "sub_group_size": 4096}
        with engine_of(tmp_path, zero, tiermem={"resident_bytes": 0, "strict": True}) as engine:
            train(engine, 2)
            slots.append(engine.shards.plan.tiles.num)
            events = [e for e in engine.shards.store.recorder.events if e.name.startswith("tile ")]
    assert slots[1] < slots[0]
    moves = {"pipeline_read": "read", "pipeline_write": "write"}[key]
    tiles = [e for e in events if e.lane == "compute"]
    assert tiles
    for move in (e for e in events if e.lane == moves):  # of the run without the pipeline
        assert not any(
            tile.start_ns < move.end_ns and move.start_ns < tile.end_ns for tile in tiles
        )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_on_nvme_rest_in_files_in_every_stage_that_shards_them(
    stage: int, tmp_path: Path
) -> None:
    """The reference takes nvme below stage 3 for cpu without a word."""
    zero = {"stage": stage, "offload_optimizer": {"device": NVME, "nvme_path": str(tmp_path)}}
    with engine_of(tmp_path, zero, tiermem={"resident_bytes": 0}) as engine:
        (folder,) = tmp_path.glob("tiermem-*")
        assert (
            sum(file.stat().st_size for file in folder.iterdir())
            >= engine.shards.plan.disk_bytes
            > 0
        )
        train(engine, 2)
        stats = engine.shards.store.stats()
        num_params = sum(param.numel() for param in engine.module.parameters())
        assert stats.nvme_read_bytes >= 8 * num_params  # both moments, at least
        assert stats.nvme_written_bytes >= 2 * 8 * num_params


def test_sub_group_size_cuts_the_step_into_tiles(tmp_path: Path) -> None:
    tiles = []
    for numel in (1 << 20, 1024):
        with engine_of(
            tmp_path, {**offloaded(tmp_path), "sub_group_size": numel}, tiermem={"strict": True}
        ) as engine:
            train(engine)
            tiles.append(
                sum(event.lane == "compute" for event in engine.shards.store.recorder.events)
            )
    assert tiles[1] > tiles[0]


# ---- tiermem -------------------------------------------------------------------------------------


def test_host_bytes_is_what_the_arena_takes_at_most(tmp_path: Path) -> None:
    with engine_of(tmp_path, offloaded(tmp_path), tiermem={"host_bytes": "32MiB"}) as engine:
        assert engine.shards.plan.host_bytes <= 32 << 20
        assert engine.shards.plan.resident_bytes > 0
    little = {"host_bytes": "64KiB"}
    with (
        pytest.raises(ValueError, match="smallest plan needs"),
        engine_of(tmp_path, tiermem=little),
    ):
        pass


def test_disk_bytes_is_what_the_files_take_at_most(tmp_path: Path) -> None:
    little = {"disk_bytes": "64KiB"}
    with (
        pytest.raises(OSError, match="disk"),
        engine_of(tmp_path, offloaded(tmp_path), tiermem=little),
    ):
        pass


def test_resident_bytes_keeps_states_off_the_disk(tmp_path: Path) -> None:
    wrote = []
    for size in ("0", "64MiB"):
        with engine_of(tmp_path, offloaded(tmp_path), tiermem={"resident_bytes": size}) as engine:
            train(engine, 2)
            wrote.append(engine.shards.store.stats().nvme_written_bytes)
    assert wrote[0] > wrote[1]


@pytest.mark.parametrize(("home", "is_written"), [("cpu", False), ("nvme", True)])
def test_grads_says_where_gradients_rest(home: str, is_written: bool, tmp_path: Path) -> None:
    own = {"grads": home, "paths": [str(tmp_path)]}
    with engine_of(tmp_path, {"offload_optimizer": {"device": "cpu"}}, tiermem=own) as engine:
        train(engine)
        events = engine.shards.store.recorder.events
        assert (
            any(event.lane == "write" and event.name.startswith("grad") for event in events)
            == is_written
        )


@pytest.mark.parametrize(
    ("clipping", "homes", "memory", "begins_early"),
    [
        (0.0, "nvme nvme", {}, True),
        (1e9, "nvme nvme", {}, True),
        (1.0, "nvme nvme", {}, False),  # clips every step
        (0.0, "cpu nvme", {}, True),  # with second copies of weights, in memory that is free
        (0.0, "cpu cpu", {}, False),
    ],
)
def test_steps_begin_under_backward_by_themselves_where_nothing_is_clipped(
    clipping: float,
    homes: str,
    memory: dict[str, int],
    begins_early: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = []
    for own in (memory, {"overlap": "none"}):
        params, states = ({"device": home, "nvme_path": str(tmp_path)} for home in homes.split())
        zero = {"stage": 3, "offload_param": params, "offload_optimizer": states}
        with engine_of(tmp_path, zero, gradient_clipping=clipping, tiermem=own) as engine:
            train(engine, 4)
            loss = loss_of(engine, 9)
            engine.backward(loss)
            found.append((bool(engine.shards.program.attempted), loss.item()))
            engine.step()
    assert found[0] == (begins_early, found[1][1])
    assert not found[1][0]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("overlap", "goes_on"), [("forward", True), ("none", False)])
def test_overlap_says_whether_a_step_goes_on_under_the_next_forward(
    overlap: str, goes_on: bool, tmp_path: Path
) -> None:
    with engine_of(tmp_path, offloaded(tmp_path), tiermem={"overlap": overlap}) as engine:
        train(engine, num_steps=2)  # the first one makes the states
        assert engine.shards.program.is_running == goes_on


@pytest.mark.parametrize("key", ["intra_op_parallelism", "thread_count", "num_threads"])
def test_engine_says_who_moves_the_blocks(key: str, tmp_path: Path) -> None:
    with engine_of(
        tmp_path, offloaded(tmp_path), tiermem={"engine": "threads"}, aio={key: 2}
    ) as engine:
        train(engine)
        stats = engine.shards.store.stats()
        assert (stats.engine, stats.nvme_read_bytes > 0) == ("threads", True)
        assert engine.shards.policy.io.threads == 2
