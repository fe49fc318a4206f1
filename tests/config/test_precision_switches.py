"""Do the precision switches mean what the reference's mean, and is exactly what it refuses
refused?"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tiermem.config import ConfigError, load_config
from tiermem.precision import PRESETS, Precision

MASTER, STATES = "bf16_master_weights_and_grads", "bf16_optimizer_states"
STAGES, DEVICES = (0, 1, 2, 3), ("none", "cpu", "nvme")
EXACT = Precision()
BF16_MASTER = Precision(master="bf16", grads="bf16", rounding="nearest")
ALL_BF16 = Precision(master="bf16", moments="bf16", grads="bf16", rounding="nearest")
FP16_MASTER = Precision(master="fp16", grads="fp16", rounding="nearest")


def config(stage: int = 3, device: str = "cpu", **sections: Any) -> dict[str, Any]:
    offload = {"device": device} | ({"nvme_path": "/a"} if device == "nvme" else {})
    return {"zero_optimization": {"stage": stage, "offload_optimizer": offload}} | sections


def precision_of(raw: dict[str, Any]) -> Precision:
    return load_config(raw).policy().precision


def problems(raw: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    assert isinstance(caught.value, ValueError)
    return {problem.path: problem.message for problem in caught.value.problems}


# ---- the matrix: bf16_master_weights_and_grads x bf16_optimizer_states x offload x stage ---------

ROWS: dict[tuple[bool, bool, str], Precision | None] = {
    (False, False, "none"): EXACT,
    (False, False, "cpu"): EXACT,
    (False, False, "nvme"): EXACT,
    (True, False, "none"): None,
    (True, False, "cpu"): BF16_MASTER,
    (True, False, "nvme"): BF16_MASTER,
    (True, True, "none"): ALL_BF16,
    (True, True, "cpu"): ALL_BF16,
    (True, True, "nvme"): ALL_BF16,
    (False, True, "none"): None,
    (False, True, "cpu"): None,
    (False, True, "nvme"): None,
}


def test_every_row_of_the_matrix_is_here() -> None:
    assert set(ROWS) == set(itertools.product((False, True), (False, True), DEVICES))


@pytest.mark.parametrize(("row", "expected"), ROWS.items())
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_row_of_the_matrix(
    stage: int, row: tuple[bool, bool, str], expected: Precision | None
) -> None:
    master, states, device = row
    raw = config(stage, device, bf16={"enabled": True, MASTER: master, STATES: states})
    if expected is not None:
        assert precision_of(raw) == expected
        return
    found = problems(raw)
    if master:
        said = found[f"bf16.{MASTER}"]
        assert "offload_optimizer.device none" in said  # what was given
        assert "allowed are zero_optimization.offload_optimizer.device cpu and nvme" in said
        assert "CPU step" in said  # why
    else:
        said = found[f"bf16.{STATES}"]
        assert f"bf16.{MASTER} false" in said
        assert "allowed is both true" in said
    assert len(found) == 1


@pytest.mark.parametrize(("master", "states"), [(True, False), (False, True), (True, True)])
def test_no_lower_states_in_stage_0(master: bool, states: bool) -> None:
    found = problems(config(0, "none", bf16={"enabled": True, MASTER: master, STATES: states}))
    for name in [name for name, is_on in ((MASTER, master), (STATES, states)) if is_on]:
        assert "zero_optimization.stage" in found[f"bf16.{name}"]
    assert any("stages 1, 2 and 3" in said for said in found.values())


def test_stage_0_without_switches_is_exact() -> None:
    assert precision_of({"bf16": {"enabled": True}}) == EXACT


# ---- fp16 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling", ["fp16_master_weights_and_grads", "fp16_master_weights_and_gradients"]
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", STAGES)
def test_fp16_master_needs_stage_and_offload(stage: int, device: str, spelling: str) -> None:
    if stage == 0 and device != "none":
        return  # offload without shards: refused for that
    raw = config(stage, device, fp16={"enabled": True, spelling: True})
    if stage and device != "none":
        assert precision_of(raw) == FP16_MASTER
        return
    found = problems(raw)
    said = found["fp16.fp16_master_weights_and_grads"]
    assert (
        "zero_optimization.stage 0" if stage == 0 else "offload_optimizer.device cpu and nvme"
    ) in said


def test_both_spellings_at_once_are_refused() -> None:
    fp16 = {
        "enabled": True,
        "fp16_master_weights_and_grads": True,
        "fp16_master_weights_and_gradients": True,
    }
    (said,) = problems(config(fp16=fp16)).values()
    assert "another spelling" in said


@pytest.mark.parametrize(
    ("section", "key"),
    [("bf16", MASTER), ("fp16", "fp16_master_weights_and_grads")],
)
@pytest.mark.parametrize("on", [None, "bf16", "fp16"])
def test_a_master_of_a_section_that_is_off_is_refused(
    section: str, key: str, on: str | None
) -> None:
    if on == section:
        return
    sections: dict[str, Any] = {section: {key: True}}
    if on is not None:
        sections[on] = {"enabled": True}
    said = problems(config(**sections))[f"{section}.{key}"]
    assert f"{section}.enabled false" in said
    assert f"computes in {on or 'fp32'}" in said


def test_both_masters_are_refused() -> None:
    raw = config(bf16={"enabled": True, MASTER: True}, fp16={"fp16_master_weights_and_grads": True})
    assert f"bf16.{MASTER} is true" in problems(raw)["fp16.fp16_master_weights_and_grads"]


# ---- optimizer.params.fp32_optimizer_states ------------------------------------------------------


def adam(**params: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": params}


def test_optimizer_states_below_fp32_follow_the_master() -> None:
    lower = adam(fp32_optimizer_states=False)
    assert precision_of(config(bf16={"enabled": True, MASTER: True}, optimizer=lower)) == ALL_BF16
    fp16 = {"enabled": True, "fp16_master_weights_and_grads": True}
    assert precision_of(config(fp16=fp16, optimizer=lower)).moments == "fp16"
    assert precision_of(config(bf16={"enabled": True}, optimizer=lower)) == EXACT


def test_fp32_states_contradict_bf16_states() -> None:
    bf16 = {"enabled": True, MASTER: True, STATES: True}
    found = problems(config(bf16=bf16, optimizer=adam(fp32_optimizer_states=True)))
    assert f"bf16.{STATES} is true" in found["optimizer.params.fp32_optimizer_states"]


# ---- gradients -----------------------------------------------------------------------------------

SPELLINGS = [
    *((name, "fp32") for name in ("fp32", "float32", "float", "torch.float32", "FP32")),
    *((name, "bf16") for name in ("bf16", "bfloat16", "torch.bfloat16")),
    *((name, "fp16") for name in ("fp16", "float16", "half", "torch.float16")),
]


@pytest.mark.parametrize(("given", "name"), SPELLINGS)
def test_gradients_are_accumulated_in_what_is_asked(given: str, name: str) -> None:
    raw = config(bf16={"enabled": True}, data_types={"grad_accum_dtype": given})
    assert precision_of(raw) == Precision(grads=name)  # type: ignore[arg-type]


def test_accumulating_in_fp32_goes_with_a_bf16_master() -> None:
    raw = config(bf16={"enabled": True, MASTER: True}, data_types={"grad_accum_dtype": "fp32"})
    assert precision_of(raw) == Precision(master="bf16", grads="fp32", rounding="nearest")


@pytest.mark.parametrize(
    "key", ["data_types.grad_accum_dtype", "communication_data_type", "torch_autocast.dtype"]
)
@pytest.mark.parametrize("value", ["int8", "fp8", 16, True])
def test_other_dtypes_are_refused(key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    assert (
        "'fp32', 'bf16' or 'fp16'"
        in problems({section: {name: value}} if section else {name: value})[key]
    )


def test_param_dtype_is_what_the_sections_say() -> None:
    assert (
        precision_of({"bf16": {"enabled": True}, "data_types": {"param_dtype": "bfloat16"}})
        == EXACT
    )
    said = problems({"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}})[
        "data_types.param_dtype"
    ]
    assert "fp16 given, but bf16 and fp16 say bf16" in said


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_gradients_are_reduced_in_what_is_asked(name: str) -> None:
    assert load_config({"communication_data_type": name}).policy().reduce_dtype == name
    assert load_config({}).policy().reduce_dtype is None


# ---- check_grad_overflow -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "choice"),
    [
        ({}, "skip"),
        ({"bf16": {"enabled": True}}, "skip"),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, "skip"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "apply"),
        ({"bf16": {"enabled": False, "check_grad_overflow": False}}, "skip"),
        (
            {
                "bf16": {"enabled": True, "check_grad_overflow": True},
                "tiermem": {"on_nonfinite": "raise"},
            },
            "raise",
        ),
        ({"tiermem": {"on_nonfinite": "apply"}}, "apply"),
    ],
)
def test_what_follows_from_the_check_of_gradients(sections: dict[str, Any], choice: str) -> None:
    assert load_config(sections).policy().on_nonfinite == choice


@pytest.mark.parametrize(("check", "own"), [(False, "skip"), (False, "raise"), (True, "apply")])
def test_a_check_that_contradicts_our_own_key_is_refused(check: bool, own: str) -> None:
    bf16 = {"enabled": True, "check_grad_overflow": check}
    said = problems({"bf16": bf16, "tiermem": {"on_nonfinite": own}})["tiermem.on_nonfinite"]
    assert f"bf16.check_grad_overflow {str(check).lower()}" in said


def test_a_dynamic_loss_scale_has_to_skip() -> None:
    fp16: dict[str, Any] = {"enabled": True}
    assert (
        "fp16.loss_scale"
        in problems({"fp16": fp16, "tiermem": {"on_nonfinite": "apply"}})["tiermem.on_nonfinite"]
    )
    fp16 |= {"loss_scale": 128}
    assert (
        load_config({"fp16": fp16, "tiermem": {"on_nonfinite": "apply"}}).policy().on_nonfinite
        == "apply"
    )


def test_keys_of_a_section_that_is_off_say_so_in_the_report() -> None:
    config = load_config(
        {"bf16": {"check_grad_overflow": False}, "torch_autocast": {"dtype": "bf16"}}
    )
    notes = {row.key: row.note for row in config.report()}
    assert notes["bf16.check_grad_overflow"] == "matters with bf16.enabled"
    assert notes["torch_autocast.dtype"] == "matters with torch_autocast.enabled"


# ---- tiermem.precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_by_name(name: str) -> None:
    assert (
        precision_of({"bf16": {"enabled": True}, "tiermem": {"precision": name}}) == PRESETS[name]
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"master": "split", "moments": "8bit"}, Precision(master="split", moments="8bit")),
        (
            {"moments": "bf16", "rounding": "nearest", "seed": 7},
            Precision(moments="bf16", rounding="nearest", seed=7),
        ),
        ({"grads": "float32"}, Precision(grads="fp32")),
        (
            {"preset": "compact", "grads": "fp32"},
            Precision(master="split", moments="bf16", grads="fp32"),
        ),
        ({}, EXACT),
    ],
)
def test_a_precision_by_its_parts(given: dict[str, Any], expected: Precision) -> None:
    assert precision_of({"bf16": {"enabled": True}, "tiermem": {"precision": given}}) == expected


def test_rounding_is_seeded_by_the_config() -> None:
    assert precision_of({"seed": 5}).seed == 5
    assert precision_of({"seed": 5, "tiermem": {"precision": {"seed": 6}}}).seed == 6


def test_an_unknown_preset_names_the_nearest() -> None:
    said = problems({"tiermem": {"precision": "compakt"}})["tiermem.precision.preset"]
    assert "'exact', 'compact', 'bf16' or 'tiny'" in said
    assert "did you mean compact?" in said


@pytest.mark.parametrize(
    ("part", "value"), [("master", "fp8"), ("moments", "4bit"), ("rounding", "up"), ("seed", -1)]
)
def test_a_part_that_does_not_exist_is_refused(part: str, value: Any) -> None:
    assert (
        "allowed is"
        in problems({"tiermem": {"precision": {part: value}}})[f"tiermem.precision.{part}"]
    )


@pytest.mark.parametrize(
    ("own", "path", "said"),
    [
        (
            "compact",
            "tiermem.precision",
            f"preset 'compact' has master 'split', but bf16.{MASTER} asks for 'bf16'",
        ),
        (
            {"master": "fp32"},
            "tiermem.precision.master",
            f"'fp32' given, but bf16.{MASTER} asks for 'bf16'",
        ),
        (
            {"moments": "8bit"},
            "tiermem.precision.moments",
            f"'8bit' given, but bf16.{STATES} asks for 'bf16'",
        ),
        (
            {"grads": "fp32"},
            "tiermem.precision.grads",
            f"'fp32' given, but bf16.{MASTER} asks for 'bf16'",
        ),
    ],
)
def test_our_own_section_may_not_contradict_a_switch(own: Any, path: str, said: str) -> None:
    bf16 = {"enabled": True, MASTER: True, STATES: True}
    assert said in problems(config(bf16=bf16, tiermem={"precision": own}))[path]


def test_our_own_section_may_add_to_the_switches() -> None:
    bf16 = {"enabled": True, MASTER: True, STATES: True}
    assert precision_of(config(bf16=bf16, tiermem={"precision": "bf16"})) == ALL_BF16
    stochastic = Precision(
        master="bf16", moments="bf16", grads="bf16", rounding="stochastic", seed=3
    )
    own = {"precision": {"rounding": "stochastic", "seed": 3}}
    assert precision_of(config(bf16=bf16, tiermem=own)) == stochastic


@pytest.mark.parametrize(
    ("section", "master"), [("fp16", "split"), ("fp16", "bf16"), ("bf16", "fp16")]
)
def test_a_master_that_the_parameters_cannot_have_is_refused(section: str, master: str) -> None:
    raw = {section: {"enabled": True}, "tiermem": {"precision": {"master": master}}}
    assert f"{section}.enabled" in problems(raw)["tiermem.precision"]


def test_the_combination_without_offload_is_had_by_our_own_section() -> None:
    own = {"precision": {"master": "bf16", "moments": "fp32"}}
    assert precision_of(config(3, "none", bf16={"enabled": True}, tiermem=own)).master == "bf16"
