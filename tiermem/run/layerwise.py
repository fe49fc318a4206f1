"""Layerwise: the micro-batches of a step go through the model block by block, so that one fetch of
a block serves all of them.

    head        micro-batch 0, 1, ...     to the first block's input; its graph stays
    blocks      block 0:  micro-batch 0, 1, ...     without gradients; each input is kept (activations.py moves it)
                block 1:  micro-batch 0, 1, ...
    tail        micro-batch 0: forward and backward; micro-batch 1: ...
    blocks      last block:  micro-batch 0: forward again with gradients, backward; micro-batch 1: ...
                ...
    head        micro-batch 0: backward; micro-batch 1: ...

Whatever the number of micro-batches, a step reads the weights of a block twice, and writes its
gradients once: those of all micro-batches are added, in their order, while the unit's home is open.
The model is a chain of blocks (chain.py) and is not rewritten. The model's own checkpointing of
blocks has no effect: blocks are checkpointed here.

Bits are those of accumulation micro-batch by micro-batch: each sees the same operations, and each
parameter's gradients are added in the same order. The exception is what the head makes for several
blocks (the embedding of a time, the output of an encoder): its gradient is the sum of the blocks'
sums, a rounding apart. A gradient that one micro-batch has only in part (tied weights, small
parameters, which share a unit) waits in memory for the rest.

Random numbers: the first micro-batch sees the generator's numbers as in a plain forward and
backward. Each other one has a stream of its own, which the generator's state and the micro-batch's
number determine, because the state after the micro-batch before is not known yet. A forward that
draws no numbers leaves the generators as they are.

Memory where the maths runs: for each micro-batch the inputs of one block and their gradients; what
blocks take beside them (a mask, a time); the graph of the head; and what one block, or the tail,
takes for one micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tiermem.run.activations import Kept, Saved
from tiermem.run.chain import (
    HEAD,
    Arguments,
    Link,
    Source,
    Walk,
    find_chain,
    no_chain,
)
from tiermem.run.shards import Shards
from tiermem.swap.base.grad_mode import call_with_grad
from tiermem.swap.memory.accelerator import is_accelerator, rng_state, set_rng_state
from tiermem.weights.backward_marks import tensors_in
from tiermem.weights.unit_state import LiveUnit

Loss = Callable[[], torch.Tensor]
"""Computes the loss of one micro-batch. It calls the model, and is called twice."""


class _Random(NamedTuple):
    """The states of the generators that a forward may use."""

    cpu: torch.Tensor
    there: torch.Tensor | None
    """Of an accelerator."""

    @classmethod
    def now(cls, device: torch.device) -> _Random:
        return cls(torch.get_rng_state(), rng_state(device) if is_accelerator(device) else None)

    def apply(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.there is not None:
            set_rng_state(device, self.there)

    def unless_new(self, other: _Random) -> _Random:
        """These states, if the others are equal."""
        is_same = torch.equal(self.cpu, other.cpu)
        if self.there is not None and other.there is not None:
            is_same = is_same and torch.equal(self.there, other.there)
        return self if is_same else other

    def of_micro_batch(self, number: int, device: torch.device) -> _Random:
        """The states that a micro-batch begins with; those of the first are these."""
        if number == 0:
            return self
        there = b"" if self.there is None else self.there.cpu().numpy().tobytes()
        text = self.cpu.numpy().tobytes() + there + number.to_bytes(8, "little")
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        here = torch.Generator().manual_seed(seed).get_state()
        return _Random(
            here,
            torch.Generator(device).manual_seed(seed).get_state()
            if self.there is not None
            else None,
        )


class _Buffers:
    """The buffers of a model, which a forward must not change, as parts of it run twice."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: (each, each._version) for name, each in model.named_buffers()}

    def check(self) -> None:
        """Raises NoChainError for a buffer that was changed."""
        now = dict(self._model.named_buffers())
        for name, (buffer, version) in self._before.items():
            if now.get(name) is not buffer or buffer._version != version:
                raise no_chain(
                    f"a forward changes the buffer {name}, and parts of a forward run twice"
                )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A block in which a forward runs; then `check`, and buffers are as before."""
        kept = {name: buffer.clone() for name, (buffer, _) in self._before.items()}
        try:
            yield
            self._write(kept)  # some kernels change a buffer and not its version
            self.check()
        finally:
            self._write(kept)
            for name, (buffer, _) in self._before.items():
                path, _, key = name.rpartition(".")
                self._model.get_submodule(path)._buffers[key] = buffer

    def _write(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Writes the values to buffers that hold others."""
        for name, (buffer, _) in self._before.items():
            both = (each.flatten().view(torch.uint8) for each in (buffer, kept[name]))
            if not torch.equal(*both):
                buffer.copy_(kept[name])


class _MicroBatch:
    """What is kept of one micro-batch between its turns."""

    def __init__(self, number: int, compute: Loss, random: _Random) -> None:
        self.compute = compute
        self.number = number
        self.at_start = random
        self.random = random  # for its next turn
        self.of_blocks: list[_Random] = []  # before each block's forward
        self.made: list[torch.Tensor] = []  # what blocks take of the head, with its graph
        self.outputs: dict[Source, torch.Tensor] = {}  # of blocks, for those that come
        self.shapes: dict[Source, torch.Size] = {}  # that outputs must have
        self.last_use: dict[Source, int] = {}  # the last block that takes it
        self.arguments: list[Arguments] = []  # of its blocks
        self.inputs: list[dict[Source, Kept]] = []  # outputs before that blocks took
        self.grads: dict[Source, torch.Tensor] = {}  # of outputs and of what the head made
        self.parts: dict[nn.Parameter, torch.Tensor] = {}  # gradients that are not complete

    def add_grad(self, source: Source, grad: torch.Tensor | None) -> None:
        """Adds a gradient to that of a source."""
        if grad is not None:
            before = self.grads.get(source)
            self.grads[source] = grad if before is None else before + grad


class _Owned(NamedTuple):
    """The trainable parameters of one part of the chain."""

    units: Sequence[LiveUnit]
    """Units that no other part needs: their gradients are complete when the part's backward has
    ended."""
    others: Sequence[nn.Parameter]
    """Parameters of other units."""


class LayerwisePasses:
    """Computes losses and gradients of a step's micro-batches, block by block.

        with passes.step(losses):
            passes.forward()
            means = passes.backward(lambda loss: loss.backward())

    Args:
        shards: the model.
        call: calls a function as forwards are called, such as under autocast.
    """

    def __init__(self, shards: Shards, call: Callable[..., Any]) -> None:
        self._model = shards.model
        self._units = shards.units
        self._hooks = shards.hooks
        self._homes = shards.homes
        self._device = shards.device
        self._call = call
        self._links: Sequence[Link] = ()  # the chain of blocks; empty until the first step
        self._micros: list[_MicroBatch] = []  # of the step under way
        self._owned: list[_Owned] = []  # of every block, and at the end of head and tail
        self._checked: set[str] = set()  # blocks that were seen to change nothing but their output
        self._shared: set[LiveUnit] = set()  # that a block needs, and something else

    @contextlib.contextmanager
    def step(self, losses: Sequence[Loss]) -> Iterator[None]:
        """A block that calls `forward` and `backward`. When it ends, the homes have the gradients
        of all micro-batches.

        Collective; blocks. Raises NoChainError where the model is no chain of blocks. If the block
        raises, the gradients are forgotten.
        """
        random = _Random.now(self._device)
        if not self._links:
            with _Buffers(self._model).restored():
                links = find_chain(self._model, losses[0])
            self._links = links
            random.apply(self._device)
        buffers = _Buffers(self._model)
        self._owned = self._divide()
        begins = (random.of_micro_batch(number, self._device) for number in range(len(losses)))
        self._micros = [
            _MicroBatch(i, *each) for i, each in enumerate(zip(losses, begins, strict=True))
        ]
        try:
            with self._hooks.joined():
                yield
            buffers.check()
            self._micros[0].random.apply(self._device)
        finally:
            self._micros = []

    def forward(self) -> None:
        """Runs the head and all blocks for every micro-batch."""
        for micro in self._micros:
            with self._drawing(micro):
                self._run_head(micro)
        for number, link in enumerate(self._links):
            with self._held(link.block):
                for micro in self._micros:
                    with self._drawing(micro):
                        self._run_block(number, micro)

    def backward(self, differentiate: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
        """Runs the tail of every micro-batch, and all backwards. Returns the losses, detached.

        differentiate: calls `backward` on a loss.
        """
        losses = []
        ended = set[LiveUnit]()
        for micro in self._micros:
            losses.append(self._run_tail(micro, differentiate))
            ended = ended or self._ended_with_tail()
            self._receive(micro, list(ended), self._owned[-1].others)
        for number in range(len(self._links) - 1, -1, -1):
            owned = self._owned[number]
            with self._held(self._links[number].block):
                for micro in self._micros:
                    self._restore(micro, owned.others)
                    self._run_block_again(number, micro)
                    self._receive(micro, owned.units, owned.others)
        for micro in self._micros:
            self._restore(micro, list(micro.parts))
            made = [source for source in micro.grads if source[0] == HEAD]
            if made:
                torch.autograd.backward(
                    [micro.made[i] for _, i in made], [micro.grads[each] for each in made]
                )
            micro.made = []
            micro.grads = {}
            self._hooks.answer_held()
            self._receive(micro, [live for live in self._owned[-1].units if live not in ended], [])
        return losses

    # ---- the parts of a pass ---------------------------------------------------------------------

    def _run_head(self, micro: _MicroBatch) -> None:
        walk = Walk(self._links, micro.compute)
        walk.to_the_end()
        micro.made = walk.made
        micro.arguments = walk.arguments
        micro.shapes = walk.shapes
        micro.last_use = {
            source: number
            for number, arguments in enumerate(walk.arguments)
            for source in arguments.sources
        }

    def _run_block(self, number: int, micro: _MicroBatch) -> None:
        """Runs one block without gradients, and keeps its input and the arguments that reached
        it."""
        link = self._links[number]
        arguments = micro.arguments[number]
        taken = {
            source: (micro.made[source[1]] if source[0] == HEAD else micro.outputs[source]).detach()
            for source in arguments.sources
        }
        args, kwargs = arguments.filled(taken)
        micro.of_blocks.append(micro.random)
        given = [(tensor, tensor._version) for tensor in tensors_in([args, kwargs])]
        reached: list[tuple[Any, Any]] = []  # the arguments of the block's calls

        def capture(block: nn.Module, args: Any, kwargs: Any) -> None:
            reached.append((args, kwargs))

        handle = link.block.register_forward_pre_hook(capture, prepend=True, with_kwargs=True)
        try:
            output = self._call(call_with_grad, False, link.block, *args, **kwargs)
        finally:
            handle.remove()
        if link.name not in self._checked:
            after = tensors_in([args, kwargs])
            if len(after) != len(given) or any(
                t is not a or v != a._version for (t, v), a in zip(given, after, strict=True)
            ):
                raise no_chain(
                    f"{link.name} changes its arguments, which its backward needs as they were: "
                    "give it no cache "
                    "(use_cache=False), and change no tensor in place"
                )
        sources = {id(tensor): source for source, tensor in taken.items()}
        micro.arguments[number] = Arguments.of(*reached[0], sources)
        inputs = [source for source in taken if source[0] != HEAD]
        micro.inputs.append(
            {each: self._keep(number, i, micro, taken[each]) for i, each in enumerate(inputs)}
        )
        leaves = tree_leaves(output)
        for i in link.tensors:
            shape = micro.shapes.get((number, i))
            if shape is not None and leaves[i].shape != shape:
                raise no_chain(
                    f"{link.name} gives a tensor of shape {tuple(leaves[i].shape)} where "
                    f"{tuple(shape)}, that of an argument, was expected"
                )
            micro.outputs[number, i] = leaves[i]
        is_last = number + 1 == len(self._links)
        micro.outputs = {
            source: tensor
            for source, tensor in micro.outputs.items()
            if micro.last_use.get(source, -1) > number or (is_last and source[0] == number)
        }

    def _run_tail(
        self, micro: _MicroBatch, differentiate: Callable[[torch.Tensor], object]
    ) -> torch.Tensor:
        """Runs the forward again without blocks, to the loss, and differentiates it."""
        # of the last block alone
        outputs = {
            i: tensor.detach().requires_grad_(tensor.is_floating_point())
            for (_, i), tensor in micro.outputs.items()
        }
        micro.outputs = {}

        def arrive() -> dict[int, torch.Tensor]:
            micro.random.apply(self._device)
            return outputs

        micro.at_start.apply(self._device)
        loss: torch.Tensor = Walk(self._links, micro.compute).through(arrive)
        micro.random = _Random.now(self._device)
        if micro.number == 0:
            # not sooner: the last step may go on under the first tail's forward
            self._hooks.begin_backward()
        differentiate(loss)
        self._hooks.answer_held()
        for i, tensor in outputs.items():
            micro.add_grad((len(self._links) - 1, i), tensor.grad)
        return loss.detach()

    def _run_block_again(self, number: int, micro: _MicroBatch) -> None:
        """Runs one block with gradients, and its backward."""
        link = self._links[number]
        grads = {i: micro.grads.pop((number, i), None) for i in link.tensors}
        arguments = micro.arguments.pop()
        kept = micro.inputs.pop()
        random = micro.of_blocks.pop()
        if all(grad is None for grad in grads.values()):
            return
        taken = {}
        for source in arguments.sources:
            made = micro.made[source[1]] if source[0] == HEAD else None
            tensor = (kept[source].take() if made is None else made).detach()
            needs_grad = tensor.is_floating_point() if made is None else made.requires_grad
            taken[source] = tensor.requires_grad_(needs_grad)
        args, kwargs = arguments.filled(taken)
        random.apply(self._device)
        # not the checkpointing that a class may add there
        block = functools.partial(nn.Module.__call__, link.block)
        leaves = tree_leaves(self._call(call_with_grad, True, block, *args, **kwargs))
        outputs = {i: leaves[i] for i, grad in grads.items() if grad is not None}
        del leaves, args, kwargs, arguments
        self._check_leaves_nothing(link)
        roots = [i for i, output in outputs.items() if output.requires_grad]
        if roots:
            torch.autograd.backward([outputs[i] for i in roots], [grads[i] for i in roots])
            self._hooks.answer_held()
            for source, tensor in taken.items():
                micro.add_grad(source, tensor.grad)

    def _check_leaves_nothing(self, link: Link) -> None:
        """Raises NoChainError for a block that keeps a tensor with a gradient on itself, such as a
        loss of its router."""
        if link.name in self._checked:
            return
        self._checked.add(link.name)
        for name, module in link.block.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    where = f"{link.name}.{name}" if name else link.name
                    raise no_chain(
                        f"{where}.{key} is made by the block and would lose its gradient"
                    )

    # ---- what waits between turns ----------------------------------------------------------------

    @contextlib.contextmanager
    def _drawing(self, micro: _MicroBatch) -> Iterator[None]:
        """Inside, random numbers are those of a micro-batch."""
        micro.random.apply(self._device)
        yield
        micro.random = micro.random.unless_new(_Random.now(self._device))

    def _keep(self, number: int, position: int, micro: _MicroBatch, tensor: torch.Tensor) -> Kept:
        activations = self._hooks.activations
        if activations is None:
            return Saved.of(tensor)
        following = (
            (micro.number + 1, number) if micro.number + 1 < len(self._micros) else (0, number - 1)
        )
        return activations.keep(tensor, lambda: self._kept(*following, position))

    def _kept(self, of: int, number: int, position: int) -> Kept | None:
        """A kept input of a block, until it is taken."""
        inputs = self._micros[of].inputs if self._micros else []
        if not 0 <= number < len(inputs):
            return None
        return next(itertools.islice(inputs[number].values(), position, None), None)

    @contextlib.contextmanager
    def _held(self, block: nn.Module) -> Iterator[None]:
        """Inside, a block's units stay present, if there are buffers for all of them."""
        needs = self._hooks.needs()
        needed = (live for module in block.modules() for live in needs.get(module, ()))
        held = [live for live in dict.fromkeys(needed) if live.is_streamed]
        if not self._hooks.prefetcher.has_room_for(held):
            held = []
        taken: list[LiveUnit] = []
        try:
            for live in held:
                self._hooks.prefetcher.acquire(live)
                taken.append(live)
            yield
        finally:
            for live in taken:
                self._hooks.prefetcher.release(live)

    def _divide(self) -> list[_Owned]:
        """The trainable parameters of each block, and at the end those of head and tail."""
        numbers = {
            module: number
            for number, link in enumerate(self._links)
            for module in link.block.modules()
        }
        needed_in: dict[LiveUnit, set[int]] = {}
        for module, needed in self._hooks.needs().items():
            for live in needed:
                needed_in.setdefault(live, set()).add(numbers.get(module, -1))
        self._shared = {live for live, blocks in needed_in.items() if len(blocks) > 1}
        found = []
        for number, link in enumerate(self._links):
            units = [
                live
                for live, blocks in needed_in.items()
                if blocks == {number} and live.unit.is_trainable
            ]
            found.append(_Owned(units, _others_in(link.block, units)))
        of_blocks = {live for owned in found for live in owned.units}
        rest = [live for live in self._units if live.unit.is_trainable and live not in of_blocks]
        return [*found, _Owned(rest, _others_in(self._model, of_blocks))]

    def _ended_with_tail(self) -> set[LiveUnit]:
        """The units of the head and the tail that no backward needs any more: those of the tail
        alone."""
        return {
            live
            for live in self._owned[-1].units
            if not (live.unit.is_resident or live in self._shared or self._hooks.is_open(live))
        }

    def _restore(self, micro: _MicroBatch, params: Sequence[nn.Parameter]) -> None:
        """Gives parameters the part of a micro-batch's gradient that there is, to which autograd
        adds."""
        for param in params:
            part = micro.parts.pop(param, None)
            if part is not None:
                param.grad = part if param.grad is None else param.grad + part

    def _receive(
        self, micro: _MicroBatch, final: Sequence[LiveUnit], others: Sequence[nn.Parameter]
    ) -> None:
        """Sends complete gradients of a micro-batch home, and keeps those of other parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            for live in final:
                self._homes.add(live.unit, is_last=micro.number == len(self._micros) - 1)
            for param in others:
                if param.grad is not None:
                    micro.parts[param], param.grad = param.grad, None


def _others_in(module: nn.Module, units: Collection[LiveUnit]) -> list[nn.Parameter]:
    """The trainable parameters of a module that are not in these units."""
    own = {id(shard.param) for live in units for shard in live.unit.shards}
    return [p for p in module.parameters() if p.requires_grad and id(p) not in own]
