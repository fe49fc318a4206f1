"""Programs: the ways in which tensors are passed to modules and handed back. Five blocks each, more
than buffers hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from programs.faces import Face, Found, Program, fit
from programs.layers import noise

WIDTH = 24


class Inner(nn.Module):
    """What every block below computes: two layers, of which the second one's output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 31)
        self.down = nn.Linear(31, WIDTH)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks of one class, and what is done with them."""

    def __init__(
        self, block: type[Inner], through: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(13, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(5)])
        self.through = through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(self.layers, self.enter(x))


def fit_chain(
    face: Face, block: type[Inner], through: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]
) -> Found:
    def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
        return model(noise(seed, 2, 5, 13)).square().mean()

    return fit(face, Chain(block, through), loss_of)


def inputs_changed_in_place(face: Face) -> Found:
    class Block(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(1.25)
            x[:, :2].add_(0.5)
            x += self.compute(x.clone())
            return x

    def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return fit_chain(face, Block, through)


def outputs_changed_in_place(face: Face) -> Found:
    class Block(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.compute(x)

    def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            y = layer(x)
            y += x
            x = nn.functional.leaky_relu(y, inplace=True)
        return x

    return fit_chain(face, Block, through)


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    depth: int = 0


@dataclasses.dataclass(slots=True)
class InSlots:
    hidden: torch.Tensor
    depth: int = 0


def dataclasses_in_and_out(face: Face) -> Found:
    class Block(Inner):
        def forward(self, state: State | InSlots) -> State | InSlots:
            kind = State if state.depth % 2 else InSlots
            return kind(state.hidden + self.compute(state.hidden), state.depth + 1)

    def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        state: State | InSlots = State(x)
        for layer in layers:
            state = layer(state)
        assert state.depth == 5
        return state.hidden

    return fit_chain(face, Block, through)


def objects_changed_by_blocks(face: Face) -> Found:
    class Block(Inner):
        def forward(self, state: State) -> None:
            state.hidden = state.hidden + self.compute(state.hidden)
            state.depth += 1

    def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        state = State(x)
        for layer in layers:
            layer(state)
        assert state.depth == 5
        return state.hidden

    return fit_chain(face, Block, through)


def dicts_changed_by_blocks(face: Face) -> Found:
    class Block(Inner):
        def forward(self, **state: Any) -> dict[str, Any]:
            state["seen"].append(state["hidden"].mean())
            return state | {"hidden": state["hidden"] + self.compute(state["hidden"])}

    def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"hidden": x, "seen": []}
        for layer in layers:
            state = layer(**state)
        return state["hidden"] + torch.stack(state["seen"]).sum()

    return fit_chain(face, Block, through)


def losses_appended_to_a_list(face: Face) -> Found:
    class Block(Inner):
        def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
            y = self.compute(x)
            losses.append(y.abs().mean())
            return x + y

    def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for layer in layers:
            x = layer(x, losses)
        assert len(losses) == 5
        return x + torch.stack(losses).sum()

    return fit_chain(face, Block, through)


def losses_kept_on_the_modules(face: Face) -> Found:
    class Block(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.compute(x)
            self.loss = self.up(x).square().mean()
            return x + y

    def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x.detach().mean() + torch.stack([layer.loss for layer in layers]).sum()

    return fit_chain(face, Block, through)


def one_tensor_as_query_key_and_value(face: Face) -> Found:
    class Block(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            assert q is k is v
            x = q + self.attention(q, k, v, need_weights=False)[0]
            x = x + self.compute(x)
            return x, x, x

    def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        state = (x, x, x)
        for layer in layers:
            state = layer(*state)
        return state[0]

    return fit_chain(face, Block, through)


def outputs_that_know_themselves(face: Face) -> Found:
    class Result:
        def __init__(self, hidden: torch.Tensor) -> None:
            self.hidden = hidden
            self.again = [self]

    class Block(Inner):
        def forward(self, x: torch.Tensor) -> Result:
            return Result(x + self.compute(x))

    def through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x).hidden
        return x

    return fit_chain(face, Block, through)


PROGRAMS: dict[str, Program] = {
    each.__name__: each
    for each in (
        inputs_changed_in_place,
        outputs_changed_in_place,
        dataclasses_in_and_out,
        objects_changed_by_blocks,
        dicts_changed_by_blocks,
        losses_appended_to_a_list,
        losses_kept_on_the_modules,
        one_tensor_as_query_key_and_value,
        outputs_that_know_themselves,
    )
}
