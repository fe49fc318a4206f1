"""A tiny Flux, and pictures with captions: what train.py needs where no real ones are

python tiny_parts.py       writes tiny-flux/ (a pipeline of diffusers) and pictures/
"""

import string
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL import Image
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

torch.manual_seed(0)
letters = string.ascii_lowercase
words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{each}</w>" for each in letters)]
pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
FluxPipeline(
    scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    vae=AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ),
    text_encoder=CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            num_attention_heads=2,
            projection_dim=32,
            bos_token_id=0,
            eos_token_id=1,
            **sizes,
        )
    ),
    tokenizer=CLIPTokenizer(
        vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77
    ),
    text_encoder_2=T5EncoderModel(
        T5Config(vocab_size=64, d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=2)
    ),
    tokenizer_2=T5TokenizerFast(
        vocab=[*pieces, *((each, -3.0) for each in letters)], extra_ids=0, model_max_length=32
    ),
    transformer=FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    ),
).save_pretrained("tiny-flux")

Path("pictures").mkdir(exist_ok=True)
for name, colour in {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}.items():
    Image.new("RGB", (64, 64), colour).save(f"pictures/{name}.png")
    Path(f"pictures/{name}.txt").write_text(f"a {name} square", "utf-8")
