"""Diffusion: components of diffusers' pipelines (a transformer or UNet, a VAE), built under
zero.Init and filled from their safetensors.

    a component's folder     config.json names the class    weights are streamed, one tensor in memory at a time
    a pipeline's folder      model_index.json               the component that is trained, if `subfolder` names no other
    one file (kohya, Comfy)  diffusers' loader renames it   the file is whole in memory while it is read

Text encoders are models of transformers (models.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.plans.activations import PredictedActivations, activations_of
from tiermem.units.unit import is_stage
from tiermem.weights_io import read_header, saved_buffers

PIPELINE_FILE = "model_index.json"
_TRAINED = ("transformer", "unet")
_CLASS_KEY = "_class_name"
"""Of a config.json: the class of diffusers."""
_UNET = "UNet2DConditionModel"
_NUM_TEXT_TOKENS = 77
"""Of CLIP, whose text a UNet sees."""


def component_folder(folder: Path) -> Path:
    """The component that is trained of a pipeline's folder; any other folder is its own. Raises
    ValueError that names the components."""
    components = [each.parent.name for each in sorted(folder.glob("*/config.json"))]
    found = next((name for name in _TRAINED if name in components), None)
    is_pipeline = (folder / PIPELINE_FILE).is_file()
    if not is_pipeline and (found is None or (folder / "config.json").is_file()):
        return folder
    if found is None:
        raise ValueError(
            f"{folder} is a pipeline of diffusers with {', '.join(components) or 'no model'}: "
            "name one of its folders (subfolder)"
        )
    return folder / found


def read_component(folder: Path) -> dict[str, Any] | None:
    """The config.json of a folder, if it names a class of diffusers; else None."""
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return config if _CLASS_KEY in config else None


def class_in_diffusers(config: Mapping[str, Any]) -> Any:
    """The class of the model that a component's config names. Raises ImportError without diffusers,
    ValueError where diffusers has no such model: the name is unknown, a scheduler's or a
    pipeline's."""
    name = config[_CLASS_KEY]
    try:
        diffusers = importlib.import_module("diffusers")
    except ImportError as error:
        raise ImportError(
            f"a {name} is a model of the diffusers library: pip install diffusers"
        ) from error
    found = getattr(diffusers, name, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ValueError(
            f"diffusers {diffusers.__version__} has no {name} among its models: give the folder of "
            "a transformer, UNet, VAE or text encoder, or pip install -U diffusers"
        )
    return found


def build_component(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A model of a component's config with diffusers' initial values, in a dtype. Buffers that are
    not saved stay as they are computed. Raises ValueError for a quantised one."""
    kind = class_in_diffusers(config)
    if config.get("quantization_config"):
        raise ValueError(
            f"the files of this {kind.__name__} are quantised: give a model in bf16, fp16 or fp32; "
            "OffloadPolicy(frozen_quant_type=...) keeps its frozen weights small"
        )
    with contextlib.ExitStack() as undoing:
        undoing.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        model = kind.from_config(dict(config))
    for _, buffer in saved_buffers(model):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return model


def build_meta(config: Mapping[str, Any]) -> tuple[nn.Module, list[nn.Module]]:
    """A component without memory, and the modules of its lists: its blocks, as units are."""
    with torch.device("meta"):
        model: nn.Module = build_component(config, torch.float32)

    def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            is_block = isinstance(module, nn.ModuleList) and not is_stage(child)
            yield from [child] if is_block else blocks_of(child)

    return model, list(blocks_of(model))


def is_unet(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a UNet with text (Stable Diffusion 1, 2, XL), whose size of
    pictures it names."""
    return config.get(_CLASS_KEY) == _UNET and isinstance(config.get("sample_size"), int)


def unet_activations(model: Any, is_checkpointing: bool) -> PredictedActivations | None:
    """The activations of a UNet on one picture of the size that its config names, in bf16. The
    model, on the meta device, becomes bf16. Takes seconds; None: its forward takes other inputs
    than latents, a time and a text."""
    nn.Module.to(model, torch.bfloat16).train()  # diffusers' own warns
    if is_checkpointing:
        model.enable_gradient_checkpointing()
    sizes = model.config
    side, width = sizes.sample_size, sizes.cross_attention_dim
    if not isinstance(width, int):
        return None
    blank = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    given: dict[str, Any] = {
        "sample": blank(1, sizes.in_channels, side, side),
        "timestep": blank(1),
        "encoder_hidden_states": blank(1, _NUM_TEXT_TOKENS, width),
    }
    if sizes.addition_embed_type == "text_time":  # of SDXL: a text and six sizes
        pooled = sizes.projection_class_embeddings_input_dim - 6 * sizes.addition_time_embed_dim
        given["added_cond_kwargs"] = {"text_embeds": blank(1, pooled), "time_ids": blank(1, 6)}

    def loss_of(model: nn.Module, given: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**given, return_dict=False)[0].float().square().mean()
        return loss

    return activations_of(model, loss_of, given, torch.device("cpu"))


def open_single_file(
    file: Path, model_class: Any, dtype: torch.dtype | None, **kwargs: Any
) -> nn.Module:
    """A model of one checkpoint file by diffusers' own loader, where the caller's Init puts it.

    kwargs: of `from_single_file`, such as `config`, the folder of the same model. Raises ValueError
    for a class that has no such loader, and for a file with weights of 8 or fewer bits.
    """
    small = {str(each.dtype) for each in read_header(file) if each.dtype.itemsize == 1}
    if small:
        raise ValueError(
            f"{file} is quantised ({', '.join(sorted(small))}): give a file in bf16, fp16 or fp32; "
            "OffloadPolicy(frozen_quant_type=...) keeps frozen weights small"
        )
    config = kwargs.get("config")
    if model_class is None and config is not None:
        folder = component_folder(Path(config) / str(kwargs.get("subfolder") or ""))
        component = read_component(folder)
        if component is not None:
            model_class = class_in_diffusers(component)
            kwargs |= {"config": str(folder), "subfolder": None}
    if not hasattr(model_class, "from_single_file"):
        raise ValueError(
            f"{file} is one file: give config=FOLDER, the folder of the same model in diffusers' "
            "format, or model_class, a class of diffusers that has from_single_file"
        )
    found: nn.Module = model_class.from_single_file(str(file), torch_dtype=dtype, **kwargs)
    return found
