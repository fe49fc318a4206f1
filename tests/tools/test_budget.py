"""Is the arithmetic of the budget what a model really saves, and is a cap that is too small refused
with it?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tiermem.policy import Tier
from tiermem.precision import Precision
from tiermem.tools.job.launcher import Job
from tiermem.tools.job.train_job import make_config
from tiermem.tools.options import TrainOptions
from tiermem.tools.plan.budget import (
    ActivationBytes,
    plan_budget,
    saved_bytes_per_token,
    state_bytes,
)
from tiermem.tools.plan.settle import settle_by_room
from tiermem.tools.presets import ModelSizes, preset
from tiermem.tools.words import Mistake

transformers: Any = pytest.importorskip("transformers")

MIB = 1 << 20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def saved_by_autograd(shape: dict[str, Any], precision: str, seq: int) -> int:
    """Bytes of distinct storages that a forward saves, parameters left out."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**shape)
    )
    for param in model.parameters():
        param.data = param.data.to(DTYPES[precision])
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, 64, (1, seq))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    del loss
    return sum(saved.values())


@pytest.mark.parametrize("num_key_value_heads", [4, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_llama_block_saves_what_the_formula_says(
    precision: str, num_key_value_heads: int
) -> None:
    shape = preset("151m") | {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    shape |= {"num_key_value_heads": num_key_value_heads}
    seq = 32
    two, four = (
        saved_by_autograd({**shape, "num_hidden_layers": n}, precision, seq) for n in (2, 4)
    )
    assert (four - two) // 2 == seq * saved_bytes_per_token(ModelSizes.of(shape), precision)


def test_the_terms_are_those_of_the_419m_model() -> None:
    budget = plan_budget(
        1250 * MIB,
        350 * MIB,
        ActivationBytes(ModelSizes.of(preset("419m")), 128, "bf16", "bf16", False, False),
    )
    terms = {term.what: term.num_bytes for term in budget.terms}
    assert terms["interpreter and libraries"] == 350 * MIB
    assert terms["activations"] == 24 * 128 * 57_416
    assert terms["one block at work"] == 128 * 57_416
    assert terms["logits and loss"] == 128 * 8192 * 16
    assert terms["gradients in autograd"] == 16_779_264 * 2
    assert budget.left_bytes == 1250 * MIB - sum(terms.values())
    assert [row.what for row in budget.rows()][-1] == "host memory of the store"


def test_products_in_fp32_take_activations_of_fp32_and_gradients_of_bf16() -> None:
    sizes = ModelSizes.of(preset("419m"))
    of = {
        (precision, compute): {
            row.what: row.num_bytes
            for row in ActivationBytes(sizes, 128, precision, compute, False, False).rows()
        }
        for precision, compute in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
    }
    mixed = of["bf16", "fp32"]
    for what in ("activations", "one block at work", "logits and loss", "repacked weight"):
        assert mixed[what] == of["fp32", "fp32"][what] > of["bf16", "bf16"][what]
    for what in ("gradients in autograd", "gradients before"):
        assert mixed[what] == of["bf16", "bf16"][what]
    assert mixed["wide gradient"] == 1024 * 8192 * 4


def test_with_checkpointing_a_layer_more_costs_one_block_input() -> None:
    def host(num_layers: int) -> int:
        shape = preset("419m") | {"num_hidden_layers": num_layers}
        return plan_budget(
            1 << 31, 0, ActivationBytes(ModelSizes.of(shape), 128, "bf16", "bf16", True, False)
        ).left_bytes

    inputs = 24 * 128 * 1024 * 2
    assert host(24) - host(48) == pytest.approx(inputs * 1.3, rel=1e-6)


def job(cap_bytes: int) -> Job:
    shape = preset("419m")
    fields: dict[str, Any] = dict.fromkeys(("checkpoint", "threads", "events_file")) | {
        "name": "",
        "data": [],
    }
    sizes = {
        "steps": 1,
        "seq": 128,
        "batch": 1,
        "seed": 0,
        "precision": "bf16",
        "is_checkpointing": False,
    }
    config = make_config(TrainOptions(), [Path()])
    return Job(
        shape=shape,
        config=config,
        memory_limit_bytes=cap_bytes,
        nvme_paths=["."],
        **fields,
        **sizes,
    )


@pytest.mark.slow
def test_a_cap_that_is_too_small_is_refused_with_the_smallest_that_is_not() -> None:
    with pytest.raises(
        Mistake, match=r"--memory 400\.0 MiB is too small .*\(400\.0 MiB - 350\.0 MiB \(interpreter"
    ) as caught:
        settle_by_room(job(400 * MIB), 350 * MIB)
    advised = int(caught.value.instead["--memory"].removeprefix("--memory ").removesuffix("MiB"))
    _, budget = settle_by_room(job(advised * MIB), 350 * MIB)
    assert budget is not None and budget.left_bytes > 0
    with pytest.raises(Mistake, match=f"--memory {advised}MiB is the smallest that works"):
        settle_by_room(job((advised - 20) * MIB), 350 * MIB)


def test_a_shape_without_a_key_names_it() -> None:
    with pytest.raises(ValueError, match="hidden_size"):
        ModelSizes.of({"model_type": "mystery"})


def test_other_families_names_are_understood() -> None:
    sizes = ModelSizes.of({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 10})
    assert sizes == ModelSizes(64, 256, 2, 4, 64, 10)


@pytest.mark.parametrize(("precision", "per_param"), [("bf16", 14), ("fp16", 14), ("fp32", 12)])
def test_state_bytes(precision: str, per_param: int) -> None:
    assert state_bytes(1000, precision) == 1000 * per_param


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("exact", 14000), ("compact", 8000), ("bf16", 6000), ("tiny", 6032)]
)
def test_state_bytes_of_a_preset(name: str, num_bytes: int) -> None:
    assert state_bytes(1000, "bf16", Precision.preset(name)) == num_bytes


def test_by_layer_block_inputs_and_hidden_states_of_all_micro_batches_are_counted() -> None:
    sizes, num_tokens = ModelSizes.of(preset("419m")), 128
    hidden_bytes = num_tokens * sizes.hidden * 2

    def rows(at_once: int | None, home: Tier | None = None) -> dict[str, tuple[int, Tier]]:
        found = ActivationBytes(sizes, num_tokens, "bf16", "bf16", True, True, at_once)
        return {row.what: (row.num_bytes, row.tier) for row in found.rows(home)}

    assert rows(None)["activations"] == (sizes.num_layers * hidden_bytes, Tier.DEVICE)
    assert rows(4)["activations"] == (4 * sizes.num_layers * hidden_bytes, Tier.DEVICE)
    # in use, and on its way
    assert rows(4, Tier.NVME)["activations"] == (2 * 4 * hidden_bytes, Tier.DEVICE)
    assert rows(4)["between blocks"] == (5 * hidden_bytes, Tier.DEVICE)
    assert "between blocks" not in rows(None)
