"""Tiny models of diffusers' families, each with the batches that it takes.

A batch is the arguments of a forward: noise of some size, a time, and the text that a text encoder
would give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

diffusers: Any = pytest.importorskip("diffusers", reason="pip install diffusers")

NUM_TOKENS = 6
Batch = dict[str, Any]


class Family(NamedTuple):
    """How a model of a family is made, and its arguments for latents of size x size."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    lora: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _flux_batch(generator: torch.Generator, size: int) -> Batch:
    places = torch.zeros(size * size, 3)
    places[:, 1] = torch.arange(size).repeat_interleave(size)
    places[:, 2] = torch.arange(size).repeat(size)
    return {
        "hidden_states": _noise(generator, 1, size * size, 4),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 32),
        "pooled_projections": _noise(generator, 1, 32),
        "timestep": torch.rand(1, generator=generator),
        "guidance": torch.ones(1),
        "img_ids": places,
        "txt_ids": torch.zeros(NUM_TOKENS, 3),
    }


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )


def qwen_image() -> nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )


def _qwen_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "hidden_states": _noise(generator, 1, size * size, 16),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 16),
        "encoder_hidden_states_mask": torch.ones(1, NUM_TOKENS, dtype=torch.long),
        "timestep": torch.rand(1, generator=generator),
        "img_shapes": [[(1, size, size)]],
    }


def wan() -> nn.Module:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def _wan_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "hidden_states": _noise(generator, 1, 4, 2, size, size),
        "timestep": torch.randint(0, 1000, (1,), generator=generator),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 16),
    }


def sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _sd3_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "hidden_states": _noise(generator, 1, 4, size, size),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 32),
        "pooled_projections": _noise(generator, 1, 64),
        "timestep": torch.randint(0, 1000, (1,), generator=generator),
    }


def sdxl() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=16,
        norm_num_groups=4,
    )


def _sdxl_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "sample": _noise(generator, 1, 4, size, size),
        "timestep": torch.randint(0, 1000, (1,), generator=generator),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 16),
        "added_cond_kwargs": {
            "text_embeds": _noise(generator, 1, 32),
            "time_ids": torch.ones(1, 6),
        },
    }


def pixart() -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=32,
        caption_channels=16,
        norm_type="ada_norm_single",
        use_additional_conditions=False,
    )


def _pixart_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "hidden_states": _noise(generator, 1, 4, size, size),
        "timestep": torch.randint(0, 1000, (1,), generator=generator),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 16),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def hunyuan_video() -> nn.Module:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )


def _hunyuan_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "hidden_states": _noise(generator, 1, 4, 2, size, size),
        "timestep": torch.randint(0, 1000, (1,), generator=generator),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 16),
        "pooled_projections": _noise(generator, 1, 8),
        "encoder_attention_mask": torch.ones(1, NUM_TOKENS),
        "guidance": torch.full((1,), 6000.0),
    }


def ltx_video() -> nn.Module:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=16,
    )


def _ltx_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "hidden_states": _noise(generator, 1, 2 * size * size, 4),
        "timestep": torch.randint(0, 1000, (1,), generator=generator),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 16),
        "encoder_attention_mask": torch.ones(1, NUM_TOKENS, dtype=torch.bool),
        "num_frames": 2,
        "height": size,
        "width": size,
    }


def lumina2() -> nn.Module:
    return diffusers.Lumina2Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(128, 128, 128),
        cap_feat_dim=32,
    )


def _lumina_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "hidden_states": _noise(generator, 1, 4, size, size),
        "timestep": torch.rand(1, generator=generator),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 32),
        "encoder_attention_mask": torch.ones(1, NUM_TOKENS, dtype=torch.bool),
    }


def sana() -> nn.Module:
    return diffusers.SanaTransformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
    )


def _sana_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "hidden_states": _noise(generator, 1, 4, size, size),
        "timestep": torch.randint(0, 1000, (1,), generator=generator),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 8),
    }


def cogvideox() -> nn.Module:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        max_text_seq_length=NUM_TOKENS,
        use_rotary_positional_embeddings=True,
    )


def _cogvideox_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "hidden_states": _noise(generator, 1, 2, 4, size, size),
        "timestep": torch.randint(0, 1000, (1,), generator=generator),
        "encoder_hidden_states": _noise(generator, 1, NUM_TOKENS, 8),
    }


FAMILIES = {
    "flux": Family(flux, _flux_batch, ("to_q", "to_k", "to_v", "proj_mlp")),
    "qwen-image": Family(qwen_image, _qwen_batch),
    "wan": Family(wan, _wan_batch),
    "sd3": Family(sd3, _sd3_batch),
    "sdxl": Family(sdxl, _sdxl_batch),
    "pixart": Family(pixart, _pixart_batch),
    "hunyuan-video": Family(hunyuan_video, _hunyuan_batch),
    "ltx-video": Family(ltx_video, _ltx_batch),
    "lumina2": Family(lumina2, _lumina_batch),
    "sana": Family(sana, _sana_batch),
    "cogvideox": Family(cogvideox, _cogvideox_batch),
}
