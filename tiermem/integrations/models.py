"""Models: `from_pretrained` builds a model of transformers or diffusers whose weights are never
whole in memory.

    name or folder -> config -> class -> built under zero.Init: every rank keeps its part
    each tensor of the safetensors files -> converted if need be -> where the policy's parameters
    rest a quantised model -> the values that its files mean, in the dtype of the model
    a component of a diffusers pipeline, or one file -> diffusion.py; the rest is alike
    an adapter -> its base model, opened in the same way -> peft adds the adapter, whose weights are
    ordinary parameters

The result is a model as zero.Init builds it: `tiermem.shard`, `initialize` and TiermemTrainer take
it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import nn

from tiermem.integrations.diffusion import (
    build_component,
    component_folder,
    open_single_file,
    read_component,
)
from tiermem.integrations.pretrained import load_pretrained_weights, take_quantizer
from tiermem.policy import OffloadPolicy
from tiermem.run.init import Init, keep_buffers_in_fp32, names_in_fp32
from tiermem.weights.absent import absent_part, become
from tiermem.weights_io import find_files, read_header

logger = logging.getLogger("tiermem")

_OF_HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")
_FILES = ["*.json", "*.safetensors", "*.py"]


def from_pretrained(
    name_or_dir: str | os.PathLike[str],
    policy: OffloadPolicy | None = None,
    model_class: Any = None,
    dtype: torch.dtype | str = "auto",
    **kwargs: Any,
) -> nn.Module:
    """Builds a model of transformers or diffusers and streams its safetensors to where the policy's
    parameters rest.

    Args:
        name_or_dir: a folder, or a name on the Hugging Face hub, whose files are downloaded; of a
            model, of a PEFT adapter, or of a diffusers pipeline (without `subfolder` its
            transformer or unet). Or one safetensors file of a diffusion model, which diffusers'
            `from_single_file` opens: give `config`, the folder of the same model in diffusers'
            format.
        policy: of the model; give `shard` or the Trainer the same. Default: everything in memory.
        model_class: a class of transformers, or one of its AutoModel classes; of a single file, a
            class of diffusers. Default: the class that the config names.
        dtype: of the weights: a dtype, or "auto": the config's, else that of the files. What
            transformers or diffusers keeps in fp32 beside bf16 or fp16 is fp32.
        kwargs: `config`; revision, cache_dir, token, local_files_only, force_download, subfolder;
            others change the config.

    Returns the model in evaluation mode. Weights that the files lack get initial values, and
    weights that the model lacks are left out, with a warning. Each rank reads the files and keeps
    its part; in memory is one tensor at a time, or one block of the model where its files have
    another format; of a single file, the file. Quantised files of transformers are dequantised. An
    adapter gives a peft.PeftModel that is ready to be trained. Collective; blocks. Raises
    ValueError for files that do not fit, and for quantised ones that cannot be dequantised while
    they are read; OSError for missing files; ImportError for an adapter without the peft library,
    or a model of diffusers without that.
    """
    init = Init(policy=policy)
    if Path(name_or_dir).is_file():
        chosen = _dtype_of(dtype, None, Path(name_or_dir))
        with init:
            model = open_single_file(Path(name_or_dir), model_class, chosen, **kwargs)
        return model.eval()
    hub = {name: kwargs.pop(name) for name in _OF_HUB if name in kwargs}
    folder = component_folder(_folder_of(name_or_dir, str(kwargs.pop("subfolder", "")), hub))
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return _with_adapter(
            folder, policy=policy, model_class=model_class, dtype=dtype, **hub, **kwargs
        )
    config = kwargs.pop("config", None)
    component = read_component(folder)
    if component is not None:
        component |= kwargs
        chosen = _dtype_of(dtype, None, folder)
        build = functools.partial(build_component, component, chosen)
        with init, _without_init(build, folder):
            model = build()
        return _filled(model, chosen, folder)
    if config is None:
        config, unused = transformers.AutoConfig.from_pretrained(
            folder, return_unused_kwargs=True, **kwargs
        )
        if unused:
            raise ValueError(
                f"from_pretrained was given {', '.join(unused)}, which the config does not have"
            )
    config = copy.deepcopy(config)
    quantizer = take_quantizer(config)
    kind = class_of(config, model_class)
    chosen = _dtype_of(dtype, config, folder)
    with init, _without_init(functools.partial(kind, config), folder):
        model = kind._from_config(config, dtype=chosen)
        model.tie_weights()  # which is a part of giving initial values
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return _filled(model, chosen, folder, quantizer)


def _filled(model: Any, dtype: torch.dtype, folder: Path, quantizer: Any = None) -> nn.Module:
    """The model with the values of a folder's files, in evaluation mode."""
    _keep_in_fp32(model, dtype)
    lacking = load_pretrained_weights(model, folder, may_lack=True, quantizer=quantizer)
    if lacking:
        logger.warning(
            "%s lacks %s, which have initial values: train them", folder, ", ".join(sorted(lacking))
        )
    found: nn.Module = model.eval()
    return found


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Makes the parameters and buffers fp32 that the model's library keeps so beside this dtype
    (`_keep_in_fp32_modules`)."""
    keep_buffers_in_fp32(model, dtype)
    kept = names_in_fp32(model, dtype)
    for name, param in model.named_parameters():
        if kept is not None and kept.search(name) and param.is_floating_point():
            with torch._C.DisableTorchFunction():  # its values rest elsewhere
                become(param, absent_part(param.shape, torch.float32, param.device))


def class_of(config: Any, model_class: Any = None) -> Any:
    """The class of transformers that a config, or an AutoModel class, means. Raises ValueError."""
    if model_class is not None:
        mapping = getattr(model_class, "_model_mapping", None)
        found = model_class if mapping is None else mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found
    names = getattr(config, "architectures", None) or []
    found = next(
        (getattr(transformers, name) for name in names if hasattr(transformers, name)), None
    )
    if found is None:
        said = (
            f"names {names} as its architecture, which transformers does not have"
            if names
            else "names no architecture"
        )
        raise ValueError(
            f'the config {said}: name the class of the model under "architectures" in its '
            "config.json, or give model_class in Python"
        )
    return found


def _folder_of(name_or_dir: str | os.PathLike[str], below: str, hub: dict[str, Any]) -> Path:
    """The local folder; downloads what is on the hub."""
    folder = Path(name_or_dir)
    if not folder.is_dir():
        files = [f"{below}/{each}" if below else each for each in _FILES]
        folder = Path(snapshot_download(os.fspath(name_or_dir), allow_patterns=files, **hub))
    return folder / below


def _with_adapter(folder: Path, **given: Any) -> nn.Module:
    """The base model of an adapter, with the adapter. Collective; blocks."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ImportError(
            f"{folder} holds an adapter, which the peft library opens: pip install peft"
        ) from error
    config = peft.PeftConfig.from_pretrained(folder)
    if not config.base_model_name_or_path:
        raise ValueError(
            f"{folder} does not name its base model: set base_model_name_or_path in "
            "adapter_config.json"
        )
    # of the base model; a given one is the adapter's
    given["revision"] = getattr(config, "revision", None)
    base = from_pretrained(config.base_model_name_or_path, **given)
    is_trainable = not config.is_prompt_learning  # peft trains no prompts that it has loaded
    found: nn.Module = peft.PeftModel.from_pretrained(base, folder, is_trainable=is_trainable)
    return found.eval()


def _dtype_of(asked: torch.dtype | str, config: Any, folder: Path) -> torch.dtype:
    found = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if isinstance(found, torch.dtype):
        return found
    if asked not in ("auto", None):
        raise ValueError(f'dtype is {asked!r}; allowed are "auto" and torch\'s, as "bfloat16"')
    said = getattr(config, "dtype", None)
    said = getattr(torch, said) if isinstance(said, str) else said
    if isinstance(said, torch.dtype):
        return said
    # by name, as transformers looks
    stored = (each.dtype for each in sorted(read_header(find_files(folder)[0])))
    return next(
        (each for each in stored if each.is_floating_point and each.itemsize > 1), torch.float32
    )


@contextlib.contextmanager
def _without_init(build: Callable[[], nn.Module], folder: Path) -> Iterator[None]:
    """A block in which parameters get no initial values, if the files have all values under the
    model's own names. build: builds such a model."""
    with torch.device("meta"):
        model = build()
    names: dict[int, set[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), set()).add(name)
    found = {each.name for file in find_files(folder) for each in read_header(file)}
    if not all(each & found for each in names.values()):
        yield
        return
    try:
        no_init_weights = importlib.import_module("transformers.initialization").no_init_weights
    except ImportError:  # before version 5
        no_init_weights = importlib.import_module("transformers.modeling_utils").no_init_weights
    with no_init_weights():
        yield
