"""Start: `initialize`, from a config to an engine, and the loaders of training data that it returns."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from tiermem.config import load_config
from tiermem.engine.choice import OptimizerFactory, Parameters
from tiermem.engine.engine import Engine, SchedulerFactory
from tiermem.optim.base import NativeOptimizer
from tiermem.swap.accelerator import find_device
from tiermem.zero.joining import join_ranks

# ---- Loaders of training data: what `initialize(training_data=...)` returns, and one that never ends -----------------
#
# Ranks see disjoint parts of a shuffled data set; the order depends on the seed and the epoch alone. A loader's
# `state_dict` says how far it has come, by batches that it has handed out: loaded into one that was built alike, the
# next batch is the one that would have come. Samples that were seen are passed over by number and not read, unless the
# data set is a stream.

T = TypeVar("T")


def build_loader(
    dataset: Dataset[Any],
    micro_batch: int,
    rank: int = 0,
    num_ranks: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    drop_last: bool = True,
    num_workers: int = 0,
) -> TrainingLoader:
    """Builds the loader of this rank's micro-batches.

    With several ranks a DistributedSampler deals the samples, so that every rank gets as many: with drop_last those
    left over are left out, otherwise some are dealt twice. Call `loader.sampler.set_epoch(n)`, as RepeatingLoader does,
    for another order in each epoch. An iterable data set is read as it comes and has to deal by itself.
    """
    if micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch}; it must be at least 1")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank} of {num_ranks}; allowed are 0 to {num_ranks - 1}")
    is_stream = isinstance(dataset, IterableDataset)
    generator = torch.Generator().manual_seed(seed)
    sampler: _DealtSamples | _ShuffledSamples | None = None
    if num_ranks > 1 and not is_stream:
        sampler = _DealtSamples(
            dataset, num_replicas=num_ranks, rank=rank, shuffle=True, seed=seed, drop_last=drop_last
        )
    elif not is_stream:
        sampler = _ShuffledSamples(dataset, generator=generator)  # type: ignore[arg-type]  # a data set that has a length
    return TrainingLoader(
        dataset,
        batch_size=micro_batch,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        drop_last=drop_last,
        generator=generator,
    )


class _Skipping:
    """A sampler that leaves out the first samples of its next pass."""

    num_skipped = 0

    def __iter__(self) -> Iterator[int]:
        num_skipped, self.num_skipped = self.num_skipped, 0
        return itertools.islice(super().__iter__(), num_skipped, None)  # type: ignore[misc]  # of the sampler beside it


class _DealtSamples(_Skipping, DistributedSampler[Any]):
    """This rank's samples."""


class _ShuffledSamples(_Skipping, RandomSampler):
    """All samples."""


class TrainingLoader(DataLoader[Any]):
    """torch's loader, which knows how far it has come."""

    _num_batches = 0  # handed out in the pass at hand
    _epoch_start: torch.Tensor | None = None  # the generator when that pass began
    _to_skip = 0  # batches, in the next pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own iterators, counted
        skipped, self._to_skip = self._to_skip, 0
        self._num_batches = skipped
        self._epoch_start = self.generator.get_state() if self.generator is not None else None
        sampler: object = self.sampler
        if isinstance(sampler, _Skipping):
            sampler.num_skipped, skipped = skipped * (self.batch_size or 1), 0
        return self._count(super().__iter__(), skipped)

    def state_dict(self) -> dict[str, Any]:
        """How far it has come: batches of this pass, the pass, and the generator that its order came from."""
        epoch = self.sampler.epoch if isinstance(self.sampler, DistributedSampler) else 0
        start = self._epoch_start
        if start is None and self.generator is not None:
            start = self.generator.get_state()
        return {"num_batches": self._num_batches, "epoch": epoch, "generator": start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `iter()` goes on from there."""
        self._num_batches = self._to_skip = int(state["num_batches"])
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(int(state["epoch"]))
        if self.generator is not None and state["generator"] is not None:
            self.generator.set_state(state["generator"])
            self._epoch_start = state["generator"]

    def _count(self, batches: Iterator[Any], to_pass_over: int) -> Iterator[Any]:
        for batch in itertools.islice(batches, to_pass_over, None):
            self._num_batches += 1
            yield batch


class RepeatingLoader(Generic[T]):
    """Iterates over a loader again and again, with the next epoch's order each time.

    Iteration continues where it stopped when `iter()` is called again. Raises ValueError when the loader is empty,
    rather than looking for a first batch for ever.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._batches: Iterator[T] | None = None  # of this epoch, from its first batch on

    def __iter__(self) -> Iterator[T]:
        return self

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> T:
        if self._batches is None:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            return self._first_of_next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """How far the loader inside has come. Raises TypeError when that does not say."""
        inside = getattr(self.loader, "state_dict", None)
        if inside is None:
            raise TypeError(
                f"a {type(self.loader).__name__} has no state_dict, so its place is not known; build_loader's has"
            )
        return {"loader": inside()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next batch is the one that would have come."""
        self._batches = None
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]  # as `state_dict` has asked

    def _first_of_next_epoch(self) -> T:
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(sampler.epoch + 1)
        self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError("the loader yields no batch: fewer samples than one micro-batch on this rank?") from None


# ---- Start: `initialize`, from a config to an engine -----------------------------------------------------------------
#
# config -> torchrun's ranks join, unless a process group is there -> Engine -> a loader of micro-batches, if asked for


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Engine, NativeOptimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Shards a model by a config and returns (engine, optimizer, loader, scheduler).

    Args:
        args: a namespace whose `deepspeed_config` names the config file, when `config` is not given. A model may stand here:
            `initialize(model, config=...)`.
        model: built plainly or under `tiermem.zero.Init`.
        optimizer: one of ours, or torch's of the same name, or a function of the parameters; its groups and settings are
            kept, the step becomes ours. Default: what the config says; with neither, the engine is for inference.
        model_parameters: what the optimizer steps, parameters or groups; default: all that require gradients.
        training_data: a dataset, for which a loader of micro-batches (each rank its own) is returned.
        lr_scheduler: a scheduler or a function of the optimizer; default: what the config says.
        distributed_port: taken for compatibility; the port is MASTER_PORT's.
        mpu: says by get_data_parallel_group() which ranks share the model; model-parallel ranks are refused.
        dist_init_required: False: there has to be a process group already.
        mesh_param: (data-parallel, sequence-parallel) ranks; the second has to be 1.
        config: a DeepSpeed-style dict or the path of a JSON file; `config_params` is its older name.
        device: where the maths runs, and where the model is from then on; default: this rank's accelerator, else the CPU.

    Collective and blocking. Raises ConfigError (a ValueError) for a config that is wrong, ValueError when the plan does not
    fit, OSError when a path is missing, not writable or too full; all before any weight is moved.
    """
    if isinstance(args, nn.Module):
        if model is not None:
            raise ValueError("two models are given: initialize(model, config=...), or initialize(args, model, ...)")
        args, model = None, args
    if model is None:
        raise ValueError("initialize needs a model")
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ValueError("initialize needs a config: a dict or the path of a JSON file")
    loaded = load_config(given)
    on, policy = find_device(device), loaded.policy()
    if dist_init_required is False and not dist.is_initialized():
        raise RuntimeError("dist_init_required is False and there is no process group: make one, or leave it out")
    join_ranks(policy.timeout_s, on, policy.join_timeout_s)
    group = _sharing(mpu, mesh_param)
    engine = Engine(model, loaded, optimizer, model_parameters, lr_scheduler, on, group)
    loader = None
    if training_data is not None:
        topology = engine.shards.topology
        loader = build_loader(
            training_data,
            engine.train_micro_batch_size_per_gpu(),
            topology.rank,
            topology.world,
            collate_fn,
            loaded.seed,
            loaded.dataloader_drop_last,
        )
        engine.training_dataloader = loader
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _sharing(mpu: Any, mesh_param: Sequence[int] | None) -> dist.ProcessGroup | None:
    """The ranks that share the model; None: nobody says. Raises ValueError for ranks that share its layers or sequences."""
    if mesh_param is not None and list(mesh_param[1:]) != [1]:
        raise ValueError(
            f"mesh_param is {tuple(mesh_param)}: sequence parallelism does not exist here; give (data-parallel ranks, 1), or "
            "leave it out"
        )
    if mpu is None:
        return None
    names = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    size = next((getattr(mpu, name)() for name in names if hasattr(mpu, name)), 1)
    if size != 1:
        raise ValueError(
            f"mpu has {size} model-parallel ranks: a layer is not divided here, so give one of a single rank"
        )
    return cast(dist.ProcessGroup, mpu.get_data_parallel_group())
