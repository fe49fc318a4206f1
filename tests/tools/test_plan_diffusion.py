"""Does `tiermem plan` know diffusers' models: their bytes, the activations of their blocks, and
adapters?"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

diffusers: Any = pytest.importorskip("diffusers", reason="pip install diffusers")

import diffusion_tables  # noqa: E402
from programs.diffusion import FAMILIES, NUM_TOKENS  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from tiermem.policy import Tier  # noqa: E402
from tiermem.tools.options import PlanOptions  # noqa: E402
from tiermem.tools.plan.budget import saved_bytes_per_token  # noqa: E402
from tiermem.tools.plan.plan import EXIT_FITS, plan, scenario_of  # noqa: E402
from tiermem.tools.plan.planned import Planned, plan_scenario  # noqa: E402
from tiermem.tools.presets import ModelSizes, check_shape, read_shape  # noqa: E402

GIB = 1 << 30
# What autograd saves grows with heads and gates where a width is tiny.
# A UNet has no formula.
TRANSFORMERS = [name for name in FAMILIES if name not in ("sdxl", "lumina2", "sana")]


def options(model: Path, **given: Any) -> PlanOptions:
    kinds = {"gpu_bytes": 8 * GIB, "host_bytes": 16 * GIB, "seq": 64, "is_checkpointing": True}
    return PlanOptions(model=model, **(kinds | given))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pipeline's folder."""
    from transformers import T5Config, T5EncoderModel

    parts = {
        "transformer": FAMILIES["flux"].build(),
        "vae": diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4),
        "text_encoder": T5EncoderModel(T5Config(vocab_size=300, d_model=16, num_layers=2)),
    }
    for name, part in parts.items():
        part.save_pretrained(tmp_path / name)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}', "utf-8")
    return tmp_path


@pytest.mark.sampled(12)
@pytest.mark.parametrize("below", ["", "transformer", "vae", "text_encoder"])
def test_a_pipelines_folder_and_each_component_are_planned(below: str, folder: Path) -> None:
    from transformers import T5EncoderModel

    kinds = {"vae": diffusers.AutoencoderKL, "text_encoder": T5EncoderModel}
    kind = kinds.get(below, diffusers.FluxTransformer2DModel)
    console = Console(file=io.StringIO(), width=200)
    asked = options(folder / below, json_file=folder / "plan.json")
    assert plan(asked, console) == EXIT_FITS
    text = console.file.getvalue()  # type: ignore[attr-defined]
    figures = json.loads((folder / "plan.json").read_text("utf-8"))
    model = kind.from_pretrained(folder / (below or "transformer"))
    assert figures["num_params"] == sum(param.numel() for param in model.parameters())
    assert ("activations are not counted" in text) == (below == "vae")


def test_adapters_alone_have_states_and_gradients(folder: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft: make .venv/.trl")
    asked = options(folder, offload="cpu", precision="bf16", lora=4)
    planned = plan_scenario(scenario_of(asked)[0], chooses=False)
    model = FAMILIES["flux"].build()
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    expected = sum(4 * (each.in_features + each.out_features) for each in linears)
    trained = [unit for unit in planned.plan.division.units if unit.is_trainable]
    numel = sum(shard.param.numel() for unit in trained for shard in unit.shards)
    assert numel == expected
    full = plan_scenario(scenario_of(options(folder, offload="cpu", precision="bf16"))[0], False)
    assert planned.tier_bytes(Tier.HOST) < full.tier_bytes(Tier.HOST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_formula_of_activations_is_no_less_than_autograd_saves(
    name: str, dtype: torch.dtype
) -> None:
    """And at most twice as much."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = nn.Module.to(family.build(), dtype)
    saved, tokens = bytes_of_second_block(model, family, dtype)
    sizes = ModelSizes.of(json.loads(json.dumps({**model.config, "_class_name": kind_of(model)})))
    formula = saved_bytes_per_token(sizes, {torch.float32: "fp32"}.get(dtype, "bf16"))
    assert saved <= formula * tokens <= 2 * saved


def kind_of(model: nn.Module) -> str:
    return type(model).__name__


def bytes_of_second_block(model: Any, family: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of new storages that autograd saves in the second block of the largest list, and the
    tokens that it gets."""
    inputs = {
        name: each.to(dtype) if torch.is_tensor(each) and each.is_floating_point() else each
        for name, each in family.batch(torch.Generator().manual_seed(0), 16).items()
    }
    lists = [each for each in model.children() if isinstance(each, nn.ModuleList)]
    block = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))[1]
    known = {param.untyped_storage()._cdata for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}
    seen: list[Any] = []  # inputs of the block, while it runs

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in known:
            known.add(storage)
            if len(seen) == 1:
                kept[storage] = tensor
        return tensor

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append([each for each in (*args, *kwargs.values()) if torch.is_tensor(each)])

    block.register_forward_pre_hook(begin, with_kwargs=True)
    block.register_forward_hook(lambda *_: seen.append("ended"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs, return_dict=False)
    streams = [each for each in seen[0] if each.dim() == 3 and each.shape[1] > NUM_TOKENS][:1]
    tokens = streams[0].shape[1] + NUM_TOKENS
    return sum(each.untyped_storage().nbytes() for each in kept.values()), tokens


@pytest.fixture
def unet(tmp_path: Path) -> Path:
    """The config of a tiny UNet."""
    FAMILIES["sdxl"].build().save_config(tmp_path)  # type: ignore[operator]
    return tmp_path


@pytest.mark.parametrize("side", [16, 24])
def test_a_unets_picture_takes_what_autograd_saves(side: int, unet: Path) -> None:
    asked = options(unet, batch=2, seq=side * side, precision="bf16", is_checkpointing=False)
    planned = plan_scenario(scenario_of(asked)[0], chooses=False)
    model = nn.Module.to(FAMILIES["sdxl"].build(), torch.bfloat16)
    given = {
        "sample": torch.randn(2, 4, side, side, dtype=torch.bfloat16),
        "timestep": torch.zeros(2),
        "encoder_hidden_states": torch.randn(2, 77, 16, dtype=torch.bfloat16),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(2, 32, dtype=torch.bfloat16),
            "time_ids": torch.ones(2, 6),
        },
    }
    known = {param.untyped_storage()._cdata for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in known:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, FlopCounterMode(display=False) as flops:
        model(**given, return_dict=False)
    saved = sum(each.untyped_storage().nbytes() for each in kept.values())
    assert kept_bytes(planned) == pytest.approx(saved, rel=0.02)
    numel = sum(param.numel() for param in model.parameters() if param.dim() > 1)
    assert 2 * numel * planned.activations.multiplied_tokens == pytest.approx(
        flops.get_total_flops(), rel=0.05
    )


def test_a_unets_places_are_a_square_and_recomputing_takes_less(unet: Path) -> None:
    with pytest.raises(ValueError, match="a square: 16384 at 1024 px"):
        scenario_of(options(unet, seq=250))
    whole, recomputed = (
        plan_scenario(scenario_of(options(unet, seq=None, is_checkpointing=each))[0], chooses=False)
        for each in (False, True)
    )
    assert whole.scenario.seq == recomputed.scenario.seq == 256
    assert recomputed.activations.input_bytes > 0
    assert recomputed.activations.inputs_bytes < kept_bytes(whole) / 2


def kept_bytes(planned: Planned) -> int:
    return next(row.num_bytes for row in planned.activations.rows() if row.what == "activations")


@pytest.mark.slow
def test_the_page_has_what_plan_says() -> None:
    """Of one card, LoRA of Flux and the whole of SDXL."""
    card = diffusion_tables.CARDS[2]
    lines = diffusion_tables.PAGE.read_text("utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 24 GB")]
    flux, _, sdxl = diffusion_tables.MODELS
    assert rows[0][2] == str(diffusion_tables.cell(card, flux, "LoRA"))
    assert rows[2][1] == str(diffusion_tables.cell(card, sdxl, "full"))


def test_a_card_must_be_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="not timed here: name the card that it is for"):
        scenario_of(options(folder, gpu_bytes=None))


def test_files_that_tell_no_shape_are_refused_with_what_to_give(folder: Path) -> None:
    """Weights alone, as kohya and ComfyUI have them; the index of a pipeline."""
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ValueError, match=r"not the model's shape: give the config\.json"):
        scenario_of(options(weights))
    console = Console(file=io.StringIO())
    with pytest.raises(ValueError, match="no FluxPipeline among its models: give the folder"):
        plan(options(folder / "model_index.json"), console)


def test_train_refuses_a_diffusion_model(folder: Path) -> None:
    shape = read_shape(folder / "transformer" / "config.json")
    with pytest.raises(ValueError, match="is a diffusion model: write a script"):
        check_shape(shape)
