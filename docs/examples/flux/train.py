"""Flux: full fine-tuning or LoRA on your own pictures, the weights and states on any tier

A folder holds pictures, each beside a text file of the same name with its caption. Latents and text
embeddings are made first, one model after the other, and kept in `cache`; training needs neither the
text encoders nor the VAE. AdamW with fp32 masters, clipping and accumulation. With --ema averages of
the weights are kept beside the states, and samples are drawn with them. With --save-every a training
that was stopped or killed goes on with --resume.

    pip install diffusers peft                 beside tiermem (docs/start.md)
    python tiny_parts.py                       a tiny Flux and pictures, if you have no others
    python train.py                            full fine-tuning
    python train.py --lora 16                  LoRA
    python train.py --pipeline FLUX.1-dev --images DIR --size 1024 --paths /mnt/nvme0 --steps 2000
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

import tiermem
from tiermem import OffloadPolicy, Tier

asked = argparse.ArgumentParser()
asked.add_argument("--pipeline", default="tiny-flux", help="a folder of diffusers")
asked.add_argument("--images", default="pictures")
asked.add_argument("--out", default="trained")
asked.add_argument("--size", type=int, default=64, help="pixels of each side")
asked.add_argument("--offload", default="nvme", choices=["cpu", "nvme"], help="home of the states")
asked.add_argument("--paths", nargs="+", default=["."], help="folders on NVMe drives")
asked.add_argument(
    "--gpu-gib", type=float, help="of the card for weights: `plan` says device_bytes"
)
asked.add_argument("--ram-gib", type=float, help="of memory for weights and states, beside NVMe")
asked.add_argument("--lora", type=int, default=0, help="rank; 0: every weight is trained")
asked.add_argument("--steps", type=int, default=6)
asked.add_argument("--accumulate", type=int, default=4, help="pictures of a step")
asked.add_argument("--rate", type=float, default=1e-5)
asked.add_argument("--sample-every", type=int, default=0, help="steps; 0: no samples")
asked.add_argument("--save-every", type=int, default=0, help="steps; 0: at the end alone")
asked.add_argument("--resume", action="store_true", help="go on from the last saved step")
asked.add_argument(
    "--ema", type=float, default=0.0, help="decay of averages, such as 0.999; 0: none"
)
asked.add_argument("--guidance", type=float, default=3.5)
args = asked.parse_args()

out, cache = Path(args.out), Path("cache")
home = Tier.NVME if args.offload == "nvme" else Tier.HOST
size = {"device_bytes": args.gpu_gib, "host_bytes": args.ram_gib}
policy = OffloadPolicy(
    params=home,
    optim=home,
    paths=args.paths,
    activations=Tier.HOST,
    **{name: int(gib * 2**30) for name, gib in size.items() if gib is not None},
)
opening = OffloadPolicy(params=home, paths=args.paths)
none = dict.fromkeys(("text_encoder", "text_encoder_2", "transformer", "vae"))
pictures = sorted(
    each
    for each in Path(args.images).iterdir()
    if each.suffix.lower() in Image.registered_extensions()
)
parts = FluxPipeline.from_pretrained(args.pipeline, **none)

# ---- 1: latents and text embeddings; each model is opened, used and closed -----------------------


def ids_of(tokenizer: Any, caption: str, most: int) -> torch.Tensor:
    """A caption in as many tokens as the encoder was trained with."""
    words = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    length = min(most, tokenizer.model_max_length)
    ids: torch.Tensor = tokenizer(caption, max_length=length, **words).input_ids
    return ids.to(shards.device)


cache.mkdir(exist_ok=True)
texts = [each.with_suffix(".txt") for each in pictures]
if without := [each.name for each in texts if not each.is_file()]:
    raise SystemExit(f"{args.images}: pictures without a caption: {', '.join(without)} missing")
captions = [each.read_text("utf-8").strip() for each in texts]
found: list[dict[str, torch.Tensor]] = [{} for _ in pictures]
for name in ("text_encoder", "text_encoder_2", "vae"):
    model = tiermem.from_pretrained(args.pipeline, opening, subfolder=name)
    with tiermem.shard(model, opening, is_trained=False) as shards, torch.no_grad():
        for picture, caption, kept in zip(pictures, captions, found, strict=True):
            if name == "text_encoder":
                kept["pooled"] = model(ids_of(parts.tokenizer, caption, 77)).pooler_output
            elif name == "text_encoder_2":
                kept["text"] = model(ids_of(parts.tokenizer_2, caption, 512))[0]
            else:
                image = parts.image_processor.preprocess(
                    Image.open(picture).convert("RGB"), args.size, args.size
                )
                image = image.to(shards.device, model.dtype)
                latent = model.encode(image).latent_dist.sample()
                kept["latent"] = (latent - model.config.shift_factor) * model.config.scaling_factor
for picture, kept in zip(pictures, found, strict=True):
    save_file({name: each.cpu().contiguous() for name, each in kept.items()}, cache / picture.stem)
del found, model

# ---- 2: training ---------------------------------------------------------------------------------

transformer = tiermem.from_pretrained(args.pipeline, policy)  # streamed to its home
transformer.enable_gradient_checkpointing()
transformer.train()
if args.lora:
    from peft import LoraConfig

    transformer.requires_grad_(False)
    layers = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp", "proj_out"]
    transformer.add_adapter(LoraConfig(r=args.lora, lora_alpha=args.lora, target_modules=layers))


def inputs_of(kept: dict[str, torch.Tensor], packed: torch.Tensor) -> dict[str, torch.Tensor]:
    """What Flux takes beside the noisy latents and the time."""
    side = kept["latent"].shape[-1] // 2
    return {
        "encoder_hidden_states": kept["text"],
        "pooled_projections": kept["pooled"],
        "guidance": torch.full((1,), args.guidance, device=packed.device),
        "txt_ids": torch.zeros(kept["text"].shape[1], 3, device=packed.device, dtype=packed.dtype),
        "img_ids": FluxPipeline._prepare_latent_image_ids(
            1, side, side, packed.device, packed.dtype
        ),
    }


with tiermem.shard(transformer, policy) as shards:
    params = [param for param in transformer.parameters() if param.requires_grad]
    optim = tiermem.AdamW(params, lr=args.rate, weight_decay=0.01)
    averages = tiermem.EMA(transformer, decay=args.ema) if args.ema else None
    shown = averages.applied if averages is not None else contextlib.nullcontext
    first = 1
    if args.resume:
        saved = tiermem.checkpoint.load(shards, optim, out / "checkpoints")
        if saved is None:
            raise SystemExit(f"nothing is saved in {out}")
        first = saved.client_state["step"] + 1
        if averages is not None:
            averages.load_state_dict(saved.client_state["averages"])
    dtype = transformer.x_embedder.weight.dtype

    def load(picture: Path) -> dict[str, torch.Tensor]:
        return {
            name: each.to(shards.device, dtype)
            for name, each in load_file(cache / picture.stem).items()
        }

    def loss_of(kept: dict[str, torch.Tensor]) -> torch.Tensor:
        """Flow matching: the way from the picture to noise is a straight line; its slope is
        predicted."""
        clean = FluxPipeline._pack_latents(kept["latent"], *kept["latent"].shape)
        noise = torch.randn_like(clean)
        time = torch.sigmoid(torch.randn(1, device=clean.device))
        noisy = (1 - time) * clean + time * noise
        slope = transformer(
            hidden_states=noisy.to(dtype),
            timestep=time,
            return_dict=False,
            **inputs_of(kept, clean),
        )[0]
        return (slope.float() - (noise - clean).float()).square().mean()

    def draw(step: int) -> None:
        """A picture of the first caption, through diffusers' pipeline."""
        kept = load(pictures[0])
        parts.register_modules(transformer=transformer.eval())
        with shown(), torch.no_grad():
            latents = parts(
                prompt_embeds=kept["text"],
                pooled_prompt_embeds=kept["pooled"],
                height=args.size,
                width=args.size,
                num_inference_steps=4,
                guidance_scale=args.guidance,
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
            ).images
        transformer.train()
        save_file({"latents": latents.cpu()}, out / f"sample-{step}.safetensors")

    out.mkdir(exist_ok=True)
    for step in range(first, args.steps + 1):
        losses = []
        for micro in range(args.accumulate):
            loss = loss_of(load(pictures[(step * args.accumulate + micro) % len(pictures)]))
            (loss / args.accumulate).backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optim.step()
        optim.zero_grad()
        if averages is not None:
            averages.update()
        print(f"step {step}: loss {sum(losses) / len(losses):.4f}, gradient norm {norm:.3f}")
        if args.sample_every and step % args.sample_every == 0:
            draw(step)
        if args.save_every and step % args.save_every == 0:
            told = {"step": step, "averages": averages and averages.state_dict()}
            tiermem.checkpoint.save(shards, optim, out / "checkpoints", client_state=told)

    with shown():
        if args.lora:
            from peft import get_peft_model_state_dict

            adapters = get_peft_model_state_dict(transformer)
            FluxPipeline.save_lora_weights(out, transformer_lora_layers=adapters)
        else:
            transformer.save_pretrained(out / "transformer", max_shard_size="2GB")
    if averages is not None:
        averages.close()

# ---- 3: the samples, decoded; the transformer has left the memory ---------------------------------

vae = tiermem.from_pretrained(args.pipeline, opening, subfolder="vae")
with tiermem.shard(vae, opening, is_trained=False) as shards, torch.no_grad():
    for file in sorted(out.glob("sample-*.safetensors")):
        latents = load_file(file)["latents"].to(shards.device)
        latents = FluxPipeline._unpack_latents(
            latents, args.size, args.size, parts.vae_scale_factor
        )
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        image = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        parts.image_processor.postprocess(image)[0].save(file.with_suffix(".png"))
        file.unlink()
