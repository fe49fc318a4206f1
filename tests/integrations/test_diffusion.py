"""Does a diffusion model of every family train as in plain torch, full and LoRA, on NVMe with
nothing resident, one micro-batch after the other and block by block?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from programs.diffusion import FAMILIES, Batch, Family, diffusers
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

NUM_STEPS = 2
NUM_MICRO = 2
CLIP = 0.5
SIZES = (8, 12)  # of latents: each micro-batch of a step has another
Micro = tuple[Batch, torch.Tensor]

# Real time: 8 families in `make test`, the others with those marked slow.
SLOW = {"hunyuan-video", "ltx-video", "cogvideox"}
# LoRA is one mechanism: four families show it, of one and of two streams, with a UNet and for video.
WITH_LORA = {"flux", "sd3", "sdxl", "wan"}
NAMES_AND_WAYS = [
    pytest.param(name, way, marks=[] if is_quick else [pytest.mark.slow])
    for name in FAMILIES
    for way, is_quick in (("full", name not in SLOW), ("lora", name in WITH_LORA))
]


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]


def on_nvme(folder: Path, **fields: Any) -> OffloadPolicy:
    folder.mkdir(exist_ok=True)
    homes = {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.NVME, "paths": [str(folder)]}
    return OffloadPolicy(**(homes | {"persistence_numel": 0, "resident_bytes": 0} | fields))


def built(family: Family, way: str) -> nn.Module:
    """A model of a family; with LoRA its layers, which alone are trained."""
    torch.manual_seed(0)
    model = family.build()
    if way == "lora":
        peft = pytest.importorskip("peft", reason="LoRA needs peft: make .venv/.trl")
        model.requires_grad_(False)
        config = peft.LoraConfig(r=4, target_modules=list(family.lora), init_lora_weights=False)
        if hasattr(model, "add_adapter"):
            model.add_adapter(config)
        else:
            peft.inject_adapter_in_model(config, model)
    return model.train()


def micro_batches(family: Family, step: int) -> list[Micro]:
    """(arguments of a forward, noise): the target is cut to the output's shape."""
    generator = torch.Generator().manual_seed(step)
    return [
        (
            {**family.batch(generator, SIZES[(step + micro) % 2]), "return_dict": False},
            torch.randn(1, 4096, generator=generator),
        )
        for micro in range(NUM_MICRO)
    ]


def loss_of(output: Any, noise: torch.Tensor) -> torch.Tensor:
    found = output[0].float().flatten(1)
    return (found - noise[:, : found.shape[1]]).square().mean()


def trained_by(
    model: nn.Module, family: Family, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> Trained:
    """A loop as users write it: accumulation, clipping, AdamW."""
    params = [param for param in model.parameters() if param.requires_grad]
    optim, losses = make(params), []
    for step in range(NUM_STEPS):
        for inputs, noise in micro_batches(family, step):
            loss = loss_of(model(**inputs), noise)
            (loss / NUM_MICRO).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optim.step()
        optim.zero_grad()
    return Trained(losses, {name: each.clone() for name, each in model.state_dict().items()})


def trained_by_layers(model: nn.Module, family: Family, folder: Path) -> Trained:
    """The same steps, whose micro-batches go through one block after the other."""
    place = {"device": "nvme", "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": NUM_MICRO,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": place,
            "offload_optimizer": place,
        },
        "tiermem": {"accumulation": "layers", "grads": "nvme"},
    }
    engine = tiermem.initialize(model=model, config=config, device="cpu")[0]
    try:
        losses = [
            float(engine.train_batch(micro_batches(family, step), loss_of))
            for step in range(NUM_STEPS)
        ]
        return Trained(losses, dict(engine.module_state_dict()))
    finally:
        engine.close()


def assert_as_torch(mine: Trained, expected: Trained) -> None:
    """Losses within 1e-6. Weights moved by 2e-2 at most, and within 1e-3: where a gradient is about
    eps, a rounding turns AdamW's first steps."""
    assert mine.losses == pytest.approx(expected.losses, abs=1e-6, rel=0)
    assert mine.weights.keys() == expected.weights.keys()
    for name, each in expected.weights.items():
        torch.testing.assert_close(mine.weights[name], each, atol=1e-3, rtol=0, msg=name)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("name", "way"), NAMES_AND_WAYS)
def test_a_family_trains_as_in_plain_torch(name: str, way: str, tmp_path: Path) -> None:
    """With checkpointing as its users have it."""
    family = FAMILIES[name]
    model = built(family, way)
    expected = trained_by(
        copy.deepcopy(model), family, lambda params: torch.optim.AdamW(params, lr=1e-2)
    )
    assert len(set(expected.losses)) == NUM_STEPS * NUM_MICRO
    by_layers = copy.deepcopy(model)
    model.enable_gradient_checkpointing()
    with tiermem.shard(model, on_nvme(tmp_path / "nvme")):
        mine = trained_by(model, family, lambda params: tiermem.AdamW(params, lr=1e-2))
    assert_as_torch(mine, expected)
    means = [sum(expected.losses[i : i + NUM_MICRO]) / NUM_MICRO for i in (0, NUM_MICRO)]
    found = trained_by_layers(by_layers, family, tmp_path)
    assert_as_torch(found, expected._replace(losses=means))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_diffusers_opens_what_a_sharded_model_saves(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = built(family, "full")
    with tiermem.shard(model, on_nvme(tmp_path / "nvme")):
        trained = trained_by(model, family, lambda params: tiermem.AdamW(params, lr=1e-2))
        model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    found = type(model).from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(dict(found.state_dict()), trained.weights, rtol=0, atol=0)


# ---- from_pretrained -----------------------------------------------------------------------------


def opened(model: nn.Module, policy: OffloadPolicy) -> dict[str, torch.Tensor]:
    with tiermem.shard(model, policy, is_trained=False):
        return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ["flux", "wan", "sd3", "sdxl"])
def test_weights_and_dtypes_are_those_that_diffusers_gives(name: str, tmp_path: Path) -> None:
    """Wan keeps some modules in fp32, SD3 has a buffer of places."""
    built(FAMILIES[name], "full").save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    policy = on_nvme(tmp_path / "nvme")
    for dtype in (torch.float32, torch.bfloat16):
        asked = {"dtype": dtype} if dtype is torch.bfloat16 else {}
        model = tiermem.from_pretrained(tmp_path / "saved", policy, **asked)
        expected = type(model).from_pretrained(tmp_path / "saved", torch_dtype=dtype)
        plain = dict(expected.state_dict())
        torch.testing.assert_close(opened(model, policy), plain, rtol=0, atol=0)
        assert not model.training


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline's folder with a transformer, a VAE and a text encoder."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    folder = tmp_path / "pipeline"
    channels = {"block_out_channels": (8,), "latent_channels": 4, "norm_num_groups": 4}
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
    parts = {
        "transformer": FAMILIES["flux"].build(),
        "vae": diffusers.AutoencoderKL(**channels),
        "text_encoder_2": T5EncoderModel(T5Config(vocab_size=32, **sizes)),
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}', "utf-8")
    return folder


def test_a_pipelines_folder_gives_its_transformer_or_the_component_named(pipeline: Path) -> None:
    policy = on_nvme(pipeline / "nvme")
    for below, kind in (
        ({}, "FluxTransformer2DModel"),
        ({"subfolder": "vae"}, "AutoencoderKL"),
        ({"subfolder": "text_encoder_2"}, "T5EncoderModel"),
    ):
        model = tiermem.from_pretrained(pipeline, policy, **below)
        assert type(model).__name__ == kind
        where = pipeline / below.get("subfolder", "transformer")
        expected = dict(type(model).from_pretrained(where).state_dict())
        torch.testing.assert_close(opened(model, policy), expected, rtol=0, atol=0)


def test_one_file_is_opened_by_diffusers_own_loader(tmp_path: Path) -> None:
    """Under the names that LTX-Video's own files have."""
    from safetensors.torch import save_file

    plain = FAMILIES["ltx-video"].build()
    plain.save_pretrained(tmp_path / "folder")
    names = {"proj_in": "patchify_proj", "time_embed": "adaln_single", "norm_q": "q_norm"}
    stored = {}
    for name, value in plain.state_dict().items():
        for ours, theirs in (names | {"norm_k": "k_norm"}).items():
            name = name.replace(ours, theirs)
        stored[f"model.diffusion_model.{name}"] = value
    save_file(stored, tmp_path / "one.safetensors")
    policy = on_nvme(tmp_path / "nvme")
    model = tiermem.from_pretrained(
        tmp_path / "one.safetensors", policy, config=tmp_path / "folder"
    )
    expected = dict(plain.state_dict())
    torch.testing.assert_close(opened(model, policy), expected, rtol=0, atol=0)
    for given in ({}, {"config": tmp_path / "nowhere"}):
        with pytest.raises(ValueError, match="is one file: give config=FOLDER"):
            tiermem.from_pretrained(tmp_path / "one.safetensors", policy, **given)
    small = {name: each.to(torch.float8_e4m3fn) for name, each in stored.items()}
    save_file(small, tmp_path / "fp8.safetensors")
    with pytest.raises(
        ValueError, match=r"fp8\.safetensors is quantised .torch\.float8_e4m3fn.: give"
    ):
        tiermem.from_pretrained(
            tmp_path / "fp8.safetensors", policy, dtype="bfloat16", config=tmp_path / "folder"
        )


def test_folders_that_fit_nothing_are_refused_with_what_to_give(pipeline: Path) -> None:
    (pipeline / "transformer").rename(pipeline / "prior")
    with pytest.raises(
        ValueError, match="with prior, text_encoder_2, vae: name one of its folders"
    ):
        tiermem.from_pretrained(pipeline)
    config = pipeline / "vae" / "config.json"
    written = config.read_text("utf-8")
    for name in ("Nothing", "DDPMScheduler", "FluxPipeline"):
        config.write_text(written.replace("AutoencoderKL", name), "utf-8")
        with pytest.raises(ValueError, match=rf"diffusers [\d.]+ has no {name} among its models"):
            tiermem.from_pretrained(pipeline / "vae")


@pytest.mark.slow
def test_of_variants_the_files_without_one_are_read(tmp_path: Path) -> None:
    model = built(FAMILIES["sdxl"], "full")
    model.save_pretrained(tmp_path / "both")
    model.half().save_pretrained(tmp_path / "both", variant="fp16")
    dtypes = {param.dtype for param in tiermem.from_pretrained(tmp_path / "both").parameters()}
    assert dtypes == {torch.float32}
    model.save_pretrained(tmp_path / "half", variant="fp16")
    dtypes = {param.dtype for param in tiermem.from_pretrained(tmp_path / "half").parameters()}
    assert dtypes == {torch.float16}
