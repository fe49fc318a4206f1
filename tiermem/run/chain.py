"""Chain: the blocks of a model that run one after the other, each once, on the output of the block
before.

    head      all that runs before the first block     h, c, t = embed(image), embed(text), embed(time)
    blocks    modules of one or several lists          for block in blocks: c, h = block(h, c, t, mask)
    tail      all that runs after the last block       loss = mse(out(norm(h, t)), target)

    source    a tensor that a block takes: (k, i) is leaf i of block k's output; (HEAD, i) is the
              i-th tensor that the head has made with a gradient (h, c and t above)

Each block takes one tensor or several of the outputs before it as they are, and as many of the
head's as it likes. `find_chain` watches one forward without gradients and finds the chain, or
raises NoChainError with the reason. A `Walk` is one forward of the model with stand-ins in the
places of the blocks: the model's own code runs, and no block does. A walk to the end of the chain
gives the arguments of every block; a walk through a chain whose output is known gives the tail.
Between blocks a stand-in returns NaN of the right shapes, without memory. A walk raises
NoChainError where the model's code leaves the chain: it calls other blocks, changes the output of a
block before a later one gets it, or takes a gradient of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from tiermem.swap.base.grad_mode import call_with_grad
from tiermem.units.leaf import has_forward

_ADVICE = 'set accumulation to "batches", which runs every model'

HEAD = -1
Source = tuple[int, int]
"""Which tensor a block takes: see above."""


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
    container: nn.Module
    """The ModuleList or Sequential that holds it."""
    child: str
    """Its name in the container."""
    block: nn.Module
    leaves: Sequence[Any]
    """The leaves of its output; of tensors shape and dtype."""
    spec: TreeSpec
    like: Mapping[int, str]
    """Leaves of its output, each with the parameter of its forward whose argument has its shape."""

    @property
    def tensors(self) -> list[int]:
        """Which leaves of its output are tensors."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, _Leaf)]

    def output(self, tensors: Mapping[int, torch.Tensor]) -> Any:
        """An output with these tensors."""
        leaves = [tensors.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        return tree_unflatten(leaves, self.spec)


class Arguments(NamedTuple):
    """The arguments of one call of a block, without the tensors that have a source."""

    leaves: Sequence[Any]
    spec: TreeSpec
    positions: Sequence[tuple[int, Source]]
    """The leaves that were left out."""

    @classmethod
    def of(cls, args: Any, kwargs: Any, sources: Mapping[int, Source]) -> Arguments:
        """Takes the arguments apart. sources: of tensors, by their id."""
        leaves, spec = tree_flatten((args, kwargs))
        positions = [(i, sources[id(leaf)]) for i, leaf in enumerate(leaves) if id(leaf) in sources]
        for position, _ in positions:
            leaves[position] = None
        return cls(leaves, spec, positions)

    @property
    def sources(self) -> list[Source]:
        """Of the tensors that were left out, each once."""
        return list(dict.fromkeys(source for _, source in self.positions))

    def filled(self, tensors: Mapping[Source, torch.Tensor]) -> tuple[Any, Any]:
        """(args, kwargs) with a tensor for each source."""
        leaves = list(self.leaves)
        for position, source in self.positions:
            leaves[position] = tensors[source]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


# ---- finding a chain -----------------------------------------------------------------------------


class _ChainCall(NamedTuple):
    """One call of a block while the chain is looked for."""

    container: nn.Module
    child: str
    block: nn.Module
    shapes: Mapping[str, torch.Size]  # of the tensors among its arguments, by parameter
    # leaf of the output of the block before -> the parameter that takes the same tensor
    from_before: Mapping[int, str]


def find_chain(model: nn.Module, run: Callable[[], Any]) -> list[Link]:
    """Finds the chain of a model: the blocks of the ModuleList or Sequential with most parameters,
    and of ModuleLists that hand their outputs to it, or take its outputs, as they are. Returns the
    blocks in the order of their calls.

    run: computes one forward of the model; called once, without gradients. Raises NoChainError.
    """
    containers = list(_containers(model))
    if not containers:
        raise no_chain(
            f"this {type(model).__name__} has no ModuleList or Sequential of two or more modules"
        )
    watch = _ChainWatch(containers)
    with watch.watching():
        call_with_grad(False, run)
    names = {module: name for name, module in model.named_modules()}
    return watch.links(names)


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
    """Records the calls of the modules of some containers."""

    def __init__(self, containers: Sequence[nn.Module]) -> None:
        self._containers = containers
        self._calls: list[_ChainCall] = []
        # of every call; of tensors shape and dtype
        self._outputs: list[tuple[Sequence[Any], TreeSpec]] = []
        self._last: Sequence[Any] = ()  # the leaves of the output of the last call

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for container in self._containers:
            for child, block in container.named_children():
                before = functools.partial(self._begin, container, child)
                handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(block.register_forward_hook(self._end, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._last = ()

    def links(self, names: Mapping[nn.Module, str]) -> list[Link]:
        """The links of the chain that the calls form. Raises NoChainError."""
        main = max(self._containers, key=_numel)
        spans = dict[nn.Module, tuple[int, int]]()
        for number, call in enumerate(self._calls):
            spans[call.container] = spans.get(call.container, (number, 0))[0], number
        first, last = spans.get(main, (0, 0))
        if first == last or len(self._outputs) != len(self._calls):
            raise no_chain(
                f"of {len(list(main.children()))} blocks "
                f"{sum(call.container is main for call in self._calls)} were called through their "
                "container"
            )
        self._check(first, last, names)
        rest = [span for each, span in spans.items() if isinstance(each, nn.ModuleList)]
        while near := next((each for each in rest if self._may_join(each, first, last)), None):
            first = min(first, near[0])
            last = max(last, near[1])
        self._check(first, last, names)
        return [self._link(number, number == last, names) for number in range(first, last + 1)]

    def _check(self, first: int, last: int, names: Mapping[nn.Module, str]) -> None:
        calls = self._calls[first : last + 1]
        for number, call in enumerate(calls):
            name = names[call.block]
            times = sum(each.block is call.block for each in calls)
            if times > 1:
                raise no_chain(f"{name} is called {times} times in one forward")
            if number and not call.from_before:
                raise no_chain(
                    f"{name} takes no tensors of the output of the block before as they are"
                )

    def _may_join(self, span: tuple[int, int], first: int, last: int) -> bool:
        """Whether the calls of another list are next to these, and all are linked."""
        begin, end = span
        if end != first - 1 and begin != last + 1:
            return False
        linked = range(begin + 1, first + 1) if end == first - 1 else range(begin, end + 1)
        return all(self._calls[number].from_before for number in linked)

    def _link(self, number: int, is_last: bool, names: Mapping[nn.Module, str]) -> Link:
        call = self._calls[number]
        leaves, spec = self._outputs[number]
        like: dict[int, str] = {}
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, _Leaf):
                continue
            same = [name for name, shape in call.shapes.items() if shape == leaf.shape]
            taken = None if is_last else self._calls[number + 1].from_before.get(i)
            if same:
                like[i] = taken if taken in same else same[0]
        name = names[call.block]
        return Link(name, call.container, call.child, call.block, leaves, spec, like)

    def _begin(
        self, container: nn.Module, child: str, block: nn.Module, args: Any, kwargs: Any
    ) -> None:
        given = tensors_by_parameter(block, args, kwargs)
        shapes = {name: each.shape for name, each in given.items()}
        out = {id(leaf): i for i, leaf in enumerate(self._last)}
        same = {out[id(each)]: name for name, each in given.items() if id(each) in out}
        self._calls.append(_ChainCall(container, child, block, shapes, same))

    def _end(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._last, spec = tree_flatten(output)
        self._outputs.append(([_shown(leaf) for leaf in self._last], spec))


def tensors_by_parameter(block: nn.Module, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """The tensors among a call's arguments, by the names of the forward's parameters: whether they
    were given by place or by name."""
    try:
        given = inspect.signature(block.forward).bind(*args, **kwargs).arguments
    except ValueError:  # a forward without a signature
        given = {"": (args, kwargs)}
    return {
        f"{name}.{i}": leaf
        for name, value in given.items()
        for i, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, torch.Tensor)
    }


def _shown(leaf: Any) -> Any:
    return _Leaf(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


# ---- walks ---------------------------------------------------------------------------------------


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


class ForwardEnded(Exception):
    """Ends a forward at the last block, whose output is not known yet. A Walk raises and catches
    it."""


class Walk:
    """One forward of the model with stand-ins for its blocks.

    Args:
        links: the blocks of the model's chain.
        run: computes the forward.
    """

    def __init__(self, links: Sequence[Link], run: Callable[[], Any]) -> None:
        self._links = links
        self._run = run
        self._visited = 0
        # gives the tensors of the last block's output
        self._then: Callable[[], Mapping[int, torch.Tensor]] | None = None
        self._sources: dict[int, Source] = {}  # of tensors, by their id
        self._seen: dict[int, torch.Tensor] = {}  # arguments and outputs, by their id, alive
        self.made: list[torch.Tensor] = []
        """What blocks take of the head with a gradient, with its graph."""
        self.arguments: list[Arguments] = []
        """Of every block that was visited."""
        self.shapes: dict[Source, torch.Size] = {}
        """Of outputs of blocks, where the arguments tell them."""

    def to_the_end(self) -> None:
        """Runs the head, and the code between blocks. Afterwards `made` and `arguments` are those
        of all blocks."""
        with self._standing_in():
            try:
                self._run()
            except ForwardEnded:
                return
            finally:
                self._seen.clear()
        raise no_chain(f"a forward ended before it called {self._links[self._visited - 1].name}")

    def through(self, then: Callable[[], Mapping[int, torch.Tensor]]) -> Any:
        """Runs the whole forward; returns its result. `then` is called for the output of the last
        block: its tensors, by leaf."""
        self._then = then
        with self._standing_in():
            result = self._run()
        self._seen.clear()
        if self._visited != len(self._links):
            raise no_chain(f"a forward called {self._visited} of the {len(self._links)} blocks")
        return result

    @contextlib.contextmanager
    def _standing_in(self) -> Iterator[None]:
        """A block in which a call of the chain's block k calls `_visit(k, args, kwargs)` instead,
        and returns its result."""
        try:
            for number, link in enumerate(self._links):
                stand_in = _StandIn(link.block, number, self._visit)
                link.container.register_module(link.child, stand_in)
            yield
        finally:
            for link in self._links:
                link.container.register_module(link.child, link.block)

    def _visit(self, number: int, args: Any, kwargs: Any) -> Any:
        links = self._links
        link = links[number]
        if number != self._visited:
            expected = links[self._visited].name if self._visited < len(links) else "none"
            raise no_chain(f"a forward called {link.name} where others called {expected}")
        if not torch.is_grad_enabled():
            raise no_chain(
                f"{link.name} is called without gradients, as reentrant checkpointing does: turn "
                "the model's checkpointing "
                "off, as blocks are checkpointed here, or set use_reentrant=False"
            )
        given = tensors_by_parameter(link.block, args, kwargs)
        for tensor in given.values():
            self._meet(link, tensor)
        self.arguments.append(Arguments.of(args, kwargs, self._sources))
        self._visited += 1
        if number + 1 < len(links):
            made: Mapping[int, torch.Tensor] = self._made_up(number, given)
        elif self._then is None:
            raise ForwardEnded
        else:
            made = self._then()
        return link.output(made)

    def _meet(self, link: Link, tensor: torch.Tensor) -> None:
        """Finds the source of an argument that was not seen before: the head, if it has a gradient.
        Raises NoChainError for one that was made of a block's output."""
        if id(tensor) in self._seen:
            return
        self._seen[id(tensor)] = tensor
        if isinstance(tensor, _Unknown):
            raise no_chain(
                f"{link.name} takes a tensor of shape {tuple(tensor.shape)} that was made of the "
                "output of a block before, not that output as it is"
            )
        # a weight's values leave when the head has ended
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if tensor.requires_grad or is_weight:
            self._sources[id(tensor)] = HEAD, len(self.made)
            self.made.append(tensor.clone() if is_weight else tensor)

    def _made_up(self, number: int, given: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Stand-ins for the tensors of a block's output."""
        link = self._links[number]
        device = next(each.device for each in given.values())
        found = {}

        def refuse(_: torch.Tensor) -> None:
            raise no_chain(
                f"the loss depends on the output of {link.name} in another way than through the "
                "next block"
            )

        for i in link.tensors:
            like = given.get(link.like.get(i, ""))
            leaf = link.leaves[i]._replace(**({"shape": like.shape} if like is not None else {}))
            found[i] = _nan(leaf, device, refuse)
            self._seen[id(found[i])] = found[i]
            self._sources[id(found[i])] = number, i
            source = self._sources.get(id(like))
            if like is not None and (source in self.shapes or source is None or source[0] == HEAD):
                self.shapes[number, i] = like.shape
        return found


class _Unknown(torch.Tensor):
    """Values that are not known yet, and whatever a model makes of them."""

    def item(self) -> Any:
        """Raises NoChainError."""
        raise no_chain("code between the blocks looks at a value of a block's output")

    def tolist(self) -> Any:
        """Raises NoChainError."""
        return self.item()

    def __bool__(self) -> bool:
        return bool(self.item())


def _nan(leaf: _Leaf, device: torch.device, refuse: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """NaN of a shape, without memory; of integers zeros. Calls `refuse` with a gradient of it."""
    if not leaf.dtype.is_floating_point:
        zeros = torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape)
        return zeros.as_subclass(_Unknown)
    made = (
        torch.full((), float("nan"), dtype=leaf.dtype, device=device)
        .expand(leaf.shape)
        .as_subclass(_Unknown)
        .requires_grad_()
    )
    made.register_hook(refuse)
    return made
