"""Random Llamas on disk, as transformers saves them, made one file at a time: the model is never in
memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM


def write_llama(folder: Path, config: LlamaConfig, dtype: torch.dtype) -> int:
    """Writes config.json, an index and one safetensors file per block. Returns the bytes of all
    weights."""
    folder.mkdir(parents=True)
    config.architectures, config.dtype = ["LlamaForCausalLM"], dtype
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in LlamaForCausalLM(config).named_parameters()}
    files: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        files.setdefault(parts[2] if parts[1] == "layers" else parts[-2], []).append(name)
    generator, num_bytes, places = torch.Generator().manual_seed(0), 0, {}
    for block, names in files.items():
        tensors = {name: _values(name, shapes[name], generator).to(dtype) for name in names}
        save_file(tensors, folder / f"model-{block}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(names, f"model-{block}.safetensors")
        num_bytes += sum(each.nbytes for each in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return num_bytes


def _values(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return (
        torch.ones(shape)
        if "norm" in name
        else torch.empty(shape).normal_(0, 0.02, generator=generator)
    )
