"""Chain: the blocks of a model that run one after the other, each once, on the output of the block
before.

    head      all that runs before the first block     h = embed(tokens)
    blocks    modules of one ModuleList or Sequential   for block in blocks: h = block(h, mask)
    tail      all that runs after the last block       loss = cross_entropy(head(norm(h)), targets)

`find_chain` watches one forward without gradients and finds the chain, or raises NoChainError with
the reason. A `Walk` is one forward of the model with stand-ins in the places of the blocks: the
model's own code runs, and no block does. A walk to the end of the chain gives the arguments of
every block; a walk through a chain whose output is known gives the tail. Between blocks a stand-in
returns NaN of the right shape, without memory. A walk raises NoChainError where the model's code
leaves the chain: it calls other blocks, changes the output of a block before the next one gets it,
or takes a gradient of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from tiermem.swap.base.grad_mode import call_with_grad
from tiermem.units.leaf import has_forward

_ADVICE = 'set accumulation to "batches", which runs every model'


class NoChainError(RuntimeError):
    """A model's forward is no chain of blocks. The message says where, and what to change."""


def no_chain(reason: str) -> NoChainError:
    """The error with a reason."""
    return NoChainError(f'accumulation "layers" needs a chain of blocks: {reason}; {_ADVICE}')


class _Leaf(NamedTuple):
    """A tensor of a block's output: its shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype


class Link(NamedTuple):
    """One block of a chain."""

    name: str
    """The block's name in the model."""
    place: str
    """Its name in the container."""
    block: nn.Module
    hidden_in: int | None
    """Which of the leaves of its arguments is the hidden state; None: its arguments have none, as
    those of an embedding."""
    hidden_out: int
    """Which of the leaves of its output is the next hidden state."""
    leaves: Sequence[Any]
    """The leaves of its output; of tensors shape and dtype."""
    spec: TreeSpec
    keeps_shape: bool
    """Whether the two hidden states have one shape."""

    def output(self, hidden: torch.Tensor, refuse: Callable[[torch.Tensor], None]) -> Any:
        """An output with this hidden state. Other tensors are NaN; a gradient of one calls
        `refuse`."""
        leaves = [
            _nan(leaf, hidden.device, refuse) if isinstance(leaf, _Leaf) else leaf
            for leaf in self.leaves
        ]
        leaves[self.hidden_out] = hidden
        return tree_unflatten(leaves, self.spec)


class Arguments(NamedTuple):
    """The arguments of one call of a block, without the hidden state."""

    leaves: Sequence[Any]
    spec: TreeSpec
    hidden: int | None

    @classmethod
    def of(cls, args: Any, kwargs: Any, hidden: torch.Tensor | None) -> Arguments:
        """Takes the arguments apart, and leaves this tensor out; None: there is no hidden state."""
        leaves, spec = tree_flatten((args, kwargs))
        place = (
            next((i for i, leaf in enumerate(leaves) if leaf is hidden), None)
            if hidden is not None
            else None
        )
        if place is not None:
            leaves[place] = None
        return cls(leaves, spec, place)

    def with_hidden(self, hidden: torch.Tensor | None) -> tuple[Any, Any]:
        """(args, kwargs) with a hidden state."""
        leaves = list(self.leaves)
        if self.hidden is not None:
            leaves[self.hidden] = hidden
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


# ---- finding a chain -----------------------------------------------------------------------------


class _ChainCall(NamedTuple):
    """One call of a block while the chain is looked for."""

    place: str
    leaves: Sequence[Any]  # of its arguments; of tensors shape and dtype
    # (leaf of its arguments, leaf of the output before): the same tensor
    from_before: Sequence[tuple[int, int]]


class Chain:
    """The blocks of a model in the order of their calls.

    Args:
        container: the ModuleList or Sequential that holds them.
    """

    def __init__(self, container: nn.Module, links: Sequence[Link]) -> None:
        self._container = container
        self.links = links

    @contextlib.contextmanager
    def standing_in(self, visit: Callable[[int, Any, Any], Any]) -> Iterator[None]:
        """A block in which a call of the chain's block k calls `visit(k, args, kwargs)` instead,
        and returns its result."""
        try:
            for number, link in enumerate(self.links):
                self._container.register_module(link.place, _StandIn(link.block, number, visit))
            yield
        finally:
            for link in self.links:
                self._container.register_module(link.place, link.block)


class _StandIn(nn.Module):
    """Takes a block's place in its container. Attributes that it does not have are the block's."""

    def __init__(
        self, block: nn.Module, number: int, visit: Callable[[int, Any, Any], Any]
    ) -> None:
        super().__init__()
        # not as a child: modules() and parameters() do not enter the block
        self.__dict__["_stood_for"] = block
        self._number = number
        self._visit = visit
        self.training = block.training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stood_for"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `visit`."""
        return self._visit(self._number, args, kwargs)


def find_chain(model: nn.Module, run: Callable[[], Any]) -> Chain:
    """Finds the chain of a model: blocks of the ModuleList or Sequential with most parameters.

    run: computes one forward of the model; called once, without gradients. Raises NoChainError.
    """
    container = max(_containers(model), key=_numel, default=None)
    if container is None:
        raise no_chain(
            f"this {type(model).__name__} has no ModuleList or Sequential of two or more modules"
        )
    watch = _ChainWatch(container)
    with watch.watching():
        call_with_grad(False, run)
    names = {module: name for name, module in model.named_modules()}
    return Chain(container, watch.links(names))


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost lists of two or more modules."""
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    if is_list and sum(has_forward(child) for child in module.children()) > 1:
        yield module
        return
    for child in module.children():
        yield from _containers(child)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


class _ChainWatch:
    """Records the calls of a container's modules."""

    def __init__(self, container: nn.Module) -> None:
        self._blocks = dict(container.named_children())
        self._calls: list[_ChainCall] = []
        # of every call; of tensors shape and dtype
        self._outputs: list[tuple[Sequence[Any], TreeSpec]] = []
        self._last: Sequence[Any] = ()  # the leaves of the output of the last call

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for place, block in self._blocks.items():
            before = self._begin(place)
            after = self._end
            handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(block.register_forward_hook(after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._last = ()

    def links(self, names: dict[nn.Module, str]) -> list[Link]:
        """The links of the chain that the calls form. Raises NoChainError."""
        found: list[Link] = []
        places = [call.place for call in self._calls]
        calls = self._calls
        if len(places) < 2 or len(self._outputs) != len(places):
            raise no_chain(
                f"of {len(self._blocks)} blocks {len(places)} were called through their container"
            )
        for number, call in enumerate(calls):
            name = names[self._blocks[call.place]]
            if places.count(call.place) > 1:
                raise no_chain(f"{name} is called {places.count(call.place)} times in one forward")
            if number and len(call.from_before) != 1:
                raise no_chain(
                    f"{name} takes {len(call.from_before) or 'no'} tensors of the output of the "
                    "block before as they are, "
                    "not one"
                )
        for number, call in enumerate(calls):
            block, (leaves, spec) = self._blocks[call.place], self._outputs[number]
            name = names[block]
            hidden_in = call.from_before[0][0] if number else self._first_hidden()
            if number < len(calls) - 1:
                hidden_out = calls[number + 1].from_before[0][1]
            else:
                hidden_out = self._last_hidden(name, leaves, found[-1])
            given = call.leaves[hidden_in] if hidden_in is not None else None
            keeps = isinstance(given, _Leaf) and given.shape == leaves[hidden_out].shape
            found.append(Link(name, call.place, block, hidden_in, hidden_out, leaves, spec, keeps))
        return found

    def _first_hidden(self) -> int | None:
        """Which argument of the first block is the hidden state: as in the second block, or the
        first floating tensor."""
        leaves = self._calls[0].leaves
        second = self._calls[1]
        place = second.from_before[0][0] if second.from_before else None
        alike = place is not None and len(leaves) == len(second.leaves)
        candidates = [place] if alike and place is not None else range(len(leaves))
        for number in candidates:
            if isinstance(leaves[number], _Leaf) and leaves[number].dtype.is_floating_point:
                return number
        return None

    def _last_hidden(self, name: str, leaves: Sequence[Any], before: Link) -> int:
        """Which output of the last block is the hidden state: as in the block before, or the only
        floating tensor."""
        floating = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, _Leaf) and leaf.dtype.is_floating_point
        ]
        if before.hidden_out in floating and len(leaves) == len(before.leaves):
            return before.hidden_out
        if len(floating) != 1:
            raise no_chain(f"the output of {name} has {len(floating)} floating-point tensors")
        return floating[0]

    def _begin(self, place: str) -> Callable[[nn.Module, Any, Any], None]:
        def begin(block: nn.Module, args: Any, kwargs: Any) -> None:
            leaves = tree_leaves((args, kwargs))
            pairs = enumerate(leaves)
            same = [
                (i, j)
                for i, leaf in pairs
                for j, out in enumerate(self._last)
                if _is_tensor(leaf) and leaf is out
            ]
            self._calls.append(_ChainCall(place, [_shown(leaf) for leaf in leaves], same))

        return begin

    def _end(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._last, spec = tree_flatten(output)
        self._outputs.append(([_shown(leaf) for leaf in self._last], spec))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _shown(leaf: Any) -> Any:
    return _Leaf(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


# ---- walks ---------------------------------------------------------------------------------------


class ForwardEnded(Exception):
    """Ends a forward at the last block, whose output is not known yet. A Walk raises and catches
    it."""


class Walk:
    """One forward of the model with stand-ins for its blocks.

    Args:
        run: computes the forward.
    """

    def __init__(self, chain: Chain, run: Callable[[], Any]) -> None:
        self._chain = chain
        self._run = run
        self._hidden: torch.Tensor | None = None  # the output of the stand-in before
        self._visited = 0
        self._then: Callable[[], torch.Tensor] | None = None  # gives the chain's output
        self.first: torch.Tensor | None = None
        """The hidden state that the first block gets, with its graph."""
        self.arguments: list[Arguments] = []
        """Of every block that was visited."""

    def to_the_end(self) -> None:
        """Runs the head, and the code between blocks. Afterwards `first` and `arguments` are those
        of all blocks."""
        with self._chain.standing_in(self._visit):
            try:
                self._run()
            except ForwardEnded:
                return
        raise no_chain(
            f"a forward ended before it called {self._chain.links[self._visited - 1].name}"
        )

    def through(self, then: Callable[[], torch.Tensor]) -> Any:
        """Runs the whole forward; returns its result. `then` is called for the output of the last
        block."""
        self._then = then
        with self._chain.standing_in(self._visit):
            result = self._run()
        if self._visited != len(self._chain.links):
            raise no_chain(
                f"a forward called {self._visited} of the {len(self._chain.links)} blocks"
            )
        return result

    def _visit(self, number: int, args: Any, kwargs: Any) -> Any:
        link = self._chain.links[number]
        links = self._chain.links
        if number != self._visited:
            expected = links[self._visited].name if self._visited < len(links) else "none"
            raise no_chain(f"a forward called {link.name} where others called {expected}")
        if not torch.is_grad_enabled():
            raise no_chain(
                f"{link.name} is called without gradients, as reentrant checkpointing does: turn "
                "the model's checkpointing "
                "off, as blocks are checkpointed here, or set use_reentrant=False"
            )
        self._check_arguments(link, args, kwargs)
        given = tree_leaves((args, kwargs))[link.hidden_in] if link.hidden_in is not None else None
        self.arguments.append(Arguments.of(args, kwargs, given))
        self.first = given if number == 0 else self.first
        self._visited += 1
        is_last = self._visited == len(links)
        if is_last and self._then is None:
            raise ForwardEnded
        if is_last and self._then is not None:
            self._hidden = self._then()
        else:
            leaf = link.leaves[link.hidden_out]
            shape = given.shape if given is not None and link.keeps_shape else leaf.shape
            device = next(
                each.device
                for each in tree_leaves((args, kwargs))
                if isinstance(each, torch.Tensor)
            )
            self._hidden = _nan(_Leaf(shape, leaf.dtype), device, self._refuse(link))
        assert self._hidden is not None
        return link.output(self._hidden, self._refuse(link))

    def _check_arguments(self, link: Link, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        is_first = self._visited == 0
        if link.hidden_in is not None and (
            len(leaves) <= link.hidden_in
            or (
                leaves[link.hidden_in] is not self._hidden
                if not is_first
                else not _is_tensor(leaves[link.hidden_in])
            )
        ):
            raise no_chain(
                f"the hidden state that {link.name} gets is not the output of the block before"
            )
        for number, leaf in enumerate(leaves):
            if number != link.hidden_in and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise no_chain(
                    f"{link.name} takes a tensor of shape {tuple(leaf.shape)} that needs a "
                    "gradient, beside the hidden state"
                )

    def _refuse(self, link: Link) -> Callable[[torch.Tensor], None]:
        def refuse(grad: torch.Tensor) -> None:
            raise no_chain(
                f"the loss depends on the output of {link.name} in another way than through the "
                "next block"
            )

        return refuse


def _nan(leaf: _Leaf, device: torch.device, refuse: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """NaN of a shape, without memory; of integers zeros. Calls `refuse` with a gradient of it."""
    if not leaf.dtype.is_floating_point:
        return torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape)
    made = (
        torch.full((), float("nan"), dtype=leaf.dtype, device=device)
        .expand(leaf.shape)
        .requires_grad_()
    )
    made.register_hook(refuse)
    return made
