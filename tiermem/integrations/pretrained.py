"""Pretrained weights: the safetensors files of transformers' models, streamed from and to sharded
models.

    one file's name and shape      one parameter                 read and written one tensor at a time
    another name or another shape  transformers converts it      in batches: the tensors of one block of the model at a time
                                   (fused experts, renamed layers)

    quantised                      transformers dequantises it   in the same batches, to the dtype of the model

transformers lists the conversions of each kind of model and applies them, here to one batch after
the other. Versions before 5 have no conversions.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import modeling_utils
from transformers.utils import logging as progress

from tiermem.engine.checkpoints import Batch, Entries, save_weights
from tiermem.run.shards import Shards
from tiermem.swap.store.stream import FileReader
from tiermem.weights_io import (
    StoredTensor,
    WeightEntry,
    find_files,
    load_safetensors,
    names_of,
    put_value,
    read_header,
    tensors_of,
)

logger = logging.getLogger("tiermem")


def _from_version_5(name: str) -> Any:
    """A module of transformers that exists since version 5; None before."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(f"transformers.{name}")
    return None


_mapping = _from_version_5("conversion_mapping")
_loading = _from_version_5("core_model_loading")
WEIGHTS_FILE = "model.safetensors"

Meta = Mapping[str, torch.Tensor]
"""Tensors by name; their values are not read."""

# ---- writing -------------------------------------------------------------------------------------


def save_pretrained_weights(shards: Shards, folder: Path) -> None:
    """Writes `model.safetensors` as the model's own `save_pretrained` does, one batch in memory at
    a time.

    Collective; blocks. Errors are those of `save_weights`.
    """
    save_weights(
        shards, folder / WEIGHTS_FILE, batched=lambda entries: batches_of(shards.model, entries)
    )


def batches_of(model: nn.Module, entries: Entries) -> list[Batch]:
    """Divides the tensors of a state dict into the smallest batches whose conversions give the
    whole model's."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {
        tensor: entry for tensor, entry in entries.items() if not set(entry.names) & set(ignored)
    }
    named = {_first(entry.names, tied): tensor for tensor, entry in kept.items()}
    meta = {
        name: torch.empty(each.shape, dtype=kept[each].dtype, device="meta")
        for name, each in named.items()
    }
    if _reverted(model, meta).keys() == meta.keys():
        return [Batch([each], [kept[each]._replace(names=[name])]) for name, each in named.items()]
    whole = _shapes(_reverted(model, meta))
    for groups in (_by_block(meta), [list(meta)]):
        found = [_reverted(model, {name: meta[name] for name in group}) for group in groups]
        if _shapes({name: each for batch in found for name, each in batch.items()}) == whole:
            break
    return [
        _batch(model, group, named, outputs) for group, outputs in zip(groups, found, strict=True)
    ]


def _batch(model: nn.Module, group: list[str], named: Meta, outputs: Meta) -> Batch:
    def convert(values: list[torch.Tensor]) -> list[torch.Tensor]:
        converted = _reverted(model, dict(zip(group, values, strict=True)))
        return [converted[name] for name in outputs]

    in_file = [WeightEntry([name], tuple(each.shape), each.dtype) for name, each in outputs.items()]
    return Batch([named[name] for name in group], in_file, convert)


def _reverted(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A part of a state dict under the names and shapes of the files."""
    if not _has_conversions(model):
        return state
    found: dict[str, torch.Tensor] = _loading.revert_weight_conversion(model, state)
    return found


def _has_conversions(model: nn.Module) -> bool:
    return _mapping is not None and isinstance(model, modeling_utils.PreTrainedModel)


def _first(names: Sequence[str], tied: Iterable[str]) -> str:
    """The name under which a tied parameter is stored: not one of those that transformers ties to
    another."""
    return next((name for name in names if name not in tied), names[0])


def _shapes(state: Meta) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (each.shape, each.dtype) for name, each in state.items()}


def _by_block(names: Iterable[str]) -> list[list[str]]:
    """Names in groups: those of one numbered block, those of one module outside of blocks."""
    groups: dict[str, list[str]] = {}
    for name in names:
        block = re.match(r".*?\.\d+(?=\.)", name)
        groups.setdefault(block[0] if block else ".".join(name.split(".")[:-2]), []).append(name)
    return list(groups.values())


# ---- reading -------------------------------------------------------------------------------------


def take_quantizer(config: Any) -> Any:
    """Removes the quantisation from a model's config; returns transformers' object that dequantises
    its files, else None.

    Raises ValueError where transformers has no operation that dequantises tensors while they are
    read.
    """
    asked = getattr(config, "quantization_config", None)
    if asked is None:
        return None
    auto = importlib.import_module("transformers.quantizers.auto")
    found = None
    method = asked.get("quant_method") if isinstance(asked, dict) else asked.quant_method
    with contextlib.suppress(ImportError):  # of the method's own library
        asked = auto.AutoQuantizationConfig.from_dict(asked) if isinstance(asked, dict) else asked
        asked.dequantize = True
        found = auto.AutoHfQuantizer.from_config(asked, pre_quantized=True)
    if "dequantize" not in getattr(found, "get_load_operations", dict)():
        raise ValueError(
            f"the files are quantised by {getattr(method, 'value', method)}, which cannot be "
            "dequantised while they are read: give a model in bf16, fp16 or fp32; "
            "OffloadPolicy(frozen_quant_type=...) keeps its frozen weights in 4 or 8 bits"
        )
    del config.quantization_config
    return found


def load_pretrained_weights(
    model: nn.Module, path: Path, may_lack: bool = False, quantizer: Any = None
) -> set[str]:
    """Fills a model from a safetensors file, or a folder of them, in the model's own names or in
    those of transformers' files.

    Args:
        model: plain, sharded, or built under zero.Init.
        may_lack: parameters that the files lack keep their values, unless they lack all, and what
            the model lacks is left out with a warning; otherwise both raise ValueError.
        quantizer: of `take_quantizer`, for quantised files.

    Returns the names of the parameters that the files lack. Collective for sharded models; blocks;
    every rank reads the files. Raises ValueError for shapes and conversions that do not match,
    OSError for missing files.
    """
    files = find_files(path)
    stored = {each.name: (file, each) for file in files for each in read_header(file)}
    targets = tensors_of(model)
    if quantizer is None and (stored.keys() <= targets.keys() or not _has_conversions(model)):
        load_safetensors(model, path, strict=not may_lack)
        filled = {*stored}
        left_out = filled - targets.keys()
    else:
        filled = set()
        left_out = set()
        with contextlib.ExitStack() as opened, torch.no_grad():
            readers = {file: opened.enter_context(FileReader(file)) for file in files}
            for name, value in _converted(model, stored, readers, quantizer, left_out, may_lack):
                put_value(targets[name], value)
                filled.add(name)
    if left_out:
        text = "%s holds %s, which %s does not have: they are left out"
        logger.warning(text, path, ", ".join(sorted(left_out)), type(model).__name__)
    lacking = _lacking(model, filled)
    fills_nothing = bool(stored) and len(lacking) == len(names_of(model))
    if lacking and (not may_lack or fills_nothing):
        raise ValueError(f"{path} lacks {', '.join(sorted(lacking))}, which the model has")
    return lacking


class _Lazy:
    """A tensor of a file that is read when transformers takes its values."""

    def __init__(self, reader: FileReader, stored: StoredTensor) -> None:
        self._reader = reader
        self._stored = stored
        self.dtype, self.shape = stored.dtype, torch.Size(stored.shape)

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._stored.read(self._reader)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


def _converted(
    model: nn.Module,
    stored: Mapping[str, tuple[Path, StoredTensor]],
    readers: Mapping[Path, FileReader],
    quantizer: Any,
    left_out: set[str],
    may_leave: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, value) of the model's parameters and buffers. One batch is in memory at a time.
    Raises ValueError.

    left_out: gets the names that the model does not have; unless `may_leave` they raise. Those that
        transformers leaves out without a word are neither.
    """
    receiver = _on_meta(model)
    mapping = _mapping.get_model_conversion_mapping(receiver, None, quantizer)
    config = modeling_utils.LoadStateDictConfig(weight_mapping=mapping, hf_quantizer=quantizer)
    for group in _by_block(stored):
        values = {name: _Lazy(readers[stored[name][0]], stored[name][1]) for name in group}
        with _without_bars():
            said, _ = _loading.convert_and_load_state_dict_in_model(receiver, values, config)
        receiver._adjust_missing_and_unexpected_keys(said)
        left_out |= said.unexpected_keys
        if wrong := [
            *(() if may_leave else left_out),
            *said.mismatched_keys,
            *said.conversion_errors,
            *said.error_msgs,
        ]:
            raise ValueError(
                f"the files do not fit {type(model).__name__}: {', '.join(map(str, wrong))}"
            )
        for module_name, module in receiver.named_modules():
            prefix = f"{module_name}." if module_name else ""
            for kept in (module._parameters, module._buffers):
                for name, value in kept.items():
                    if value is not None and not value.is_meta:
                        yield prefix + name, value.detach()
                        kept[name] = _emptied(value)


def _emptied(value: torch.Tensor) -> Any:
    empty = torch.empty_like(value, device="meta", requires_grad=False)
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _on_meta(model: nn.Module) -> Any:
    """The same kind of model without values; each tensor has the dtype of the model's."""
    with torch.device("meta"):
        receiver = type(model)(model.config)
    shown = tensors_of(receiver)
    for name, each in tensors_of(model).items():
        shown[name].data = torch.empty(each.shape, dtype=each.dtype, device="meta")
    return receiver


def _lacking(model: nn.Module, found: Iterable[str]) -> set[str]:
    """The first names of the parameters that none of these names means."""
    names = set(found)
    return {each[0] for each in names_of(model).values() if not names.intersection(each)}


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """A block without transformers' progress bars."""
    is_on = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if is_on:
            progress.enable_progress_bar()  # type: ignore[no-untyped-call]
