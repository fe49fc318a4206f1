"""Programs: what users do with a sharded model, each run on the CPU and on a device, to be compared
to the bit.

    program(place) -> {"losses": [...], "weights": {...}, ...}      place: where the maths runs, and under which policy

All use CPU arithmetic in the end: the simulated device runs the CPU's kernels. What differs is
when: a wait that is missing, a buffer that is given back early or a home that is written while it
    is read gives other bits under some schedule.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tiermem
from programs import models, twins
from programs.faces import Found, Sharded
from programs.models import Tower
from programs.random_calls import Raises, fail
from programs.twins import batch, seeded
from tiermem import Shards, Tier
from tiermem.config.io import OffloadState
from tiermem.engine.facts import offload, reload
from tiermem.swap.store.store import TensorStore


class Place(Sharded):
    """A device and a policy, and streams of the user's there."""

    device: str
    folder: Path

    def loss_of(self, model: nn.Module, step: int) -> torch.Tensor:
        return twins.loss_of(model, step, self.device)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Work on a stream beside the current one; on a CPU there is none."""
        if self.device == "cpu":
            yield
            return
        stream, before = torch.Stream(self.device), torch.accelerator.current_stream()
        stream.wait_stream(before)
        with stream:
            yield
        before.wait_stream(stream)

    @contextlib.contextmanager
    def apart(self) -> Iterator[Callable[[], None]]:
        """Work on a stream that waits for nothing; the function that it gives makes the current
        stream wait for that work."""
        if self.device == "cpu":
            yield lambda: None
            return
        stream = torch.Stream(self.device)
        with stream:
            yield lambda: torch.accelerator.current_stream().wait_stream(stream)

    def synchronize(self) -> None:
        """Waits for the device: what any stream still does to memory that others use by now has
        happened then."""
        if self.device != "cpu":
            torch.accelerator.synchronize()


Program = Callable[[Place], Found]


def train(
    place: Place,
    model: nn.Module,
    num_steps: int = 3,
    max_norm: float = 0.0,
    micros: int = 1,
    **settings: Any,
) -> Found:
    losses = []
    with place.open(model, **settings) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(num_steps):
            for micro in range(micros):
                loss = place.loss_of(model, 7 * step + micro)
                (loss / micros).backward()
                losses.append(loss.detach())
            optim.step(max_norm=max_norm)
            optim.zero_grad()
        return found(shards, model, optim, losses)


def found(
    shards: Shards, model: nn.Module, optim: tiermem.AdamW | None, losses: list[torch.Tensor]
) -> Found:
    result: Found = {
        "losses": [loss.item() for loss in losses],
        "weights": values_of(model.state_dict()),
    }
    if optim is not None:
        result["states"] = twins.states_of(shards, optim)
    return result


def values_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


# ---- programs ------------------------------------------------------------------------------------


def plain(place: Place) -> Found:
    return train(place, seeded(Tower))


def clipped(place: Place) -> Found:
    return train(place, seeded(Tower), max_norm=0.1)


def zeroed(place: Place) -> Found:
    """Every second step is taken with gradients of zero; moments move the weights on."""
    model, losses = seeded(Tower), []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            losses.append(place.loss_of(model, step))
            losses[-1].backward()
            optim.step()
            optim.zero_grad(set_to_none=False)
            optim.step()
        return found(shards, model, optim, losses)


def in_bf16(place: Place) -> Found:
    return train(place, seeded(Tower).bfloat16(), max_norm=0.5, micros=2)


def widened(place: Place) -> Found:
    return train(place, seeded(Tower).bfloat16(), max_norm=0.5, micros=2, compute_dtype="fp32")


def frozen_in_nf4(place: Place) -> Found:
    model = seeded(models.frozen_tower).bfloat16()
    return train(place, model, micros=2, compute_dtype="fp32", frozen_quant_type="nf4")


def accumulated(place: Place) -> Found:
    return train(place, seeded(Tower), micros=3)


def checkpointed(place: Place) -> Found:
    return train(place, seeded(lambda: models.ShortTower(checkpoint=False)))


def checkpointed_reentrantly(place: Place) -> Found:
    return train(place, seeded(lambda: models.ShortTower(checkpoint=True)))


def tied(place: Place) -> Found:
    return train(place, seeded(models.tied_tower))


def frozen(place: Place) -> Found:
    return train(place, seeded(models.frozen_tower))


def unfrozen(place: Place) -> Found:
    """The head is trained first, then a block between two micro-batches, then all."""
    model = seeded(Tower).bfloat16().requires_grad_(False)
    model.head.requires_grad_(True)
    losses = []
    with place.open(model, compute_dtype="fp32") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for micro in range(8):
            if micro == 3:
                model.layers[1].requires_grad_(True)
            if micro == 6:
                model.requires_grad_(True)
            loss = place.loss_of(model, micro)
            loss.backward()
            losses.append(loss.detach())
            if micro % 2:
                optim.step(max_norm=0.5)
                optim.zero_grad()
        return found(shards, model, optim, losses)


def one_matrix_of_muon(place: Place) -> Found:
    """Python steps a whole matrix, between tiles of AdamW that are native."""
    model, losses = seeded(Tower), []
    with place.open(model, tile_numel=1 << 20) as shards:
        params = list(model.parameters())
        others = {"params": params[:9] + params[10:], "use_muon": False}
        optim = tiermem.Muon([{"params": params[9:10]}, others], lr=1e-2)
        for step in range(3):
            loss = place.loss_of(model, step)
            loss.backward()
            losses.append(loss.detach())
            optim.step()
            optim.zero_grad()
        return found(shards, model, None, losses)


def stepped_in_backward(place: Place) -> Found:
    return train(place, seeded(Tower), step_in_backward=True, grads=None)


def clipped_by_torch(place: Place) -> Found:
    """torch's own clipping; gradients that a user looks at."""
    model, losses, norms = seeded(Tower), [], []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            loss = place.loss_of(model, step)
            loss.backward()
            # as torch does on CUDA
            norms += torch._foreach_norm([param.grad for param in model.parameters()])
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            gradient = shards.gradient(model.layers[0].up.weight)
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
            losses.append(loss.detach())
        assert gradient is not None
        return found(shards, model, optim, losses) | {
            "norms": [n.item() for n in norms],
            "gradient": gradient.cpu(),
        }


def autocast(place: Place) -> Found:
    model, losses = seeded(Tower), []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            tokens, targets = (each.to(place.device) for each in batch(step))
            with torch.autocast(place.device, dtype=torch.bfloat16):
                logits = model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        return found(shards, model, optim, losses)


def scaled_by_torch(place: Place) -> Found:
    """GradScaler under autocast in fp16. A step that overflows is left out and halves the scale;
    others are clipped or not."""
    model, losses, scales = seeded(Tower), [], []
    kind = torch.device(place.device).type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**12, growth_interval=2)
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            tokens, targets = (each.to(place.device) for each in batch(step))
            with torch.autocast(kind, dtype=torch.float16):
                logits = model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) * (
                1e6 if step == 2 else 1
            )
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optim)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            losses.append(loss.detach())
            scales.append(scaler.get_scale())
        assert scales[2] == scales[1] / 2
        return found(shards, model, optim, losses) | {"scales": scales}


def in_fp16(place: Place) -> Found:
    """fp16 weights with a loss scale of one's own; the first steps overflow and leave everything as
    it was."""
    model, losses, scale, num_skipped = seeded(Tower).half(), [], 2.0**22, 0
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-3)
        for step in range(6):
            loss = place.loss_of(model, step)
            (loss * scale).backward()
            optim.step(scale=scale, max_norm=0.5)
            optim.zero_grad()
            if optim.was_skipped:
                scale, num_skipped = scale / 16, num_skipped + 1
            losses.append(loss.detach())
        assert 0 < num_skipped < 6
        return found(shards, model, optim, losses) | {"scale": scale}


def read_after_steps(place: Place) -> Found:
    """Weights are read where they rest as soon as a step has returned; none on the device, whose
    copy would wait for it."""
    model, losses, read = seeded(Tower), [], []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            losses.append(_step(place, model, optim, step))
            read.append(
                {
                    str(number): shards.weight(layer.up.weight)
                    for number, layer in enumerate(model.layers)
                }
            )
        return found(shards, model, optim, losses) | {
            f"read {step}": values for step, values in enumerate(read)
        }


def sharded_again(place: Place) -> Found:
    """Memory of a model is used for other values, and theirs for the next model, while work in it
    may be pending."""
    tokens, outputs = batch(0)[0].to(place.device), []  # a copy of them would wait for the device
    for step in range(2):
        model = seeded(Tower, step).bfloat16()
        with place.open(model, is_trained=False, compute_dtype="fp32"), torch.no_grad():
            outputs.append(model(tokens).float().square().mean())
        del model
        gc.collect()  # for the memory, which circles of objects hold
        others = torch.full((3 << 13,), 3.0 + step, device=place.device)  # as large as the slots
        place.synchronize()
        outputs.append(others.square().sum())
        del others
    return {"losses": [each.item() for each in outputs]}


def batches_there(place: Place) -> Found:
    """Batches lie on the device before training, so that no copy of them waits for the step
    before."""
    batches = [[each.to(place.device) for each in batch(step)] for step in range(4)]
    model, losses = seeded(Tower), []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for tokens, targets in batches:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        return found(shards, model, optim, losses)


def kept_present(place: Place) -> Found:
    """All units are held present, twice; what they compute is pending when they are let go, and
    when they are held again."""
    model, losses = seeded(Tower), []
    # a copy of them would wait for the device
    tokens, targets = (each.to(place.device) for each in batch(0))
    with (
        place.open(model, is_trained=False) as shards,
        torch.no_grad(),
    ):
        for _ in range(2):
            with tiermem.zero.unwrap_model_for_generation(model):
                losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
                losses.append(model.head.weight.square().sum())
        with tiermem.zero.unwrap_model_for_generation(model):
            place.synchronize()
            losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
        return found(shards, model, None, losses)


def held_and_let_go(place: Place) -> Found:
    """All units are held present on a stream of the user's, and let go. Then others are, before
    that stream is waited for."""
    model, losses = seeded(Tower), []
    tokens, targets = (each.to(place.device) for each in batch(0))
    with (
        place.open(model, is_trained=False) as shards,
        torch.no_grad(),
    ):
        for seed in range(2):
            with place.apart() as join, tiermem.zero.unwrap_model_for_generation(model):
                pass
            model.load_state_dict(seeded(Tower, 1 + seed).state_dict())
            with tiermem.zero.unwrap_model_for_generation(model):
                join()
                losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
        return found(shards, model, None, losses)


def held_until_backward_ends(place: Place) -> Found:
    """The first block runs twice. Its first input needs no gradient, so the block is let go at the
    end of backward, on another stream than that which computes with it. Then an evaluation, on a
    third stream, needs its memory."""
    batches = [[each.to(place.device) for each in batch(step)] for step in range(6)]
    model, losses = seeded(Tower), []
    model.embed.requires_grad_(False)
    model.layers.insert(0, model.layers[0])
    place.synchronize()
    # no step writes what the device reads in place
    with place.open(model, persistence_numel=0) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)

        def loss_of(number: int) -> torch.Tensor:
            return F.cross_entropy(
                model(batches[number][0]).flatten(0, 1), batches[number][1].flatten()
            )

        for step in range(0, 6, 2):
            with place.aside():
                losses.append(loss_of(step))
            losses[-1].backward()
            with place.apart(), torch.no_grad():
                losses.append(torch.tensor(loss_of(step + 1).item()))
            optim.step()
            optim.zero_grad()
        return found(shards, model, optim, [loss.detach() for loss in losses])


def evaluated_aside(place: Place) -> Found:
    """What an evaluation on a stream of the user's reads is pending while a step counts. The next
    backward begins with a unit of which a parameter is not used: it is copied before any gradient
    is waited for."""
    batches = [[each.to(place.device) for each in batch(step)] for step in range(8)]
    model, losses = seeded(Tower).bfloat16(), []
    model.head.forward = lambda x: F.linear(x, model.head.weight)
    place.synchronize()
    with place.open(
        model, persistence_numel=0, compute_dtype="fp32"
    ) as shards:  # no step writes what is read in place
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number, (tokens, targets) in enumerate(batches):
            is_aside = number % 2 == 1
            with (
                place.apart() if is_aside else contextlib.nullcontext(),
                torch.set_grad_enabled(not is_aside),
            ):
                losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
            if is_aside:
                optim.step()
                optim.zero_grad()
            else:
                losses[-1].backward()
        place.synchronize()
        return found(shards, model, optim, [loss.detach() for loss in losses])


def branches_stepped_in_backward(place: Place) -> Found:
    """Blocks beside each other, each on a stream of its own: no gradient waits for the step of
    another block."""
    model, losses = seeded(Tower), []
    with place.open(model, step_in_backward=True, grads=None) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            x, parts = model.embed(batch(step)[0].to(place.device)), []
            for layer in model.layers:
                with place.aside():
                    parts.append(layer(x * 1.0).square().mean())
            loss = torch.stack(parts).sum()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
            place.synchronize()  # before memory of these streams is freed
        return found(shards, model, optim, losses)


def left_and_closed(place: Place) -> Found:
    """A store's memory on the device leaves, comes back, and has left again when the store is
    closed."""
    with TensorStore(device=torch.device(place.device)) as store:
        store.reserve("kind/name", (5000,), torch.float32, Tier.DEVICE)
        values = store.view("kind/name").fill_(1.5)
        for _ in range(2):
            store.on_device.leave(["kind"])
            store.on_device.come_back()
        total = values.sum().item()
        values.mul_(2.0)
        store.on_device.leave(["kind"])
    return {"losses": [total]}


def evaluated_between(place: Place) -> Found:
    model, losses = seeded(Tower), []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            with torch.no_grad():
                losses.append(place.loss_of(model.eval(), 50 + step))
            loss = place.loss_of(model.train(), step)
            loss.backward()
            with torch.inference_mode():
                losses.append(place.loss_of(model, 60 + step))
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        return found(shards, model, optim, losses)


def inference(place: Place) -> Found:
    model = seeded(Tower)
    with (
        place.open(model, is_trained=False) as shards,
        torch.no_grad(),
    ):
        losses = [place.loss_of(model, step) for step in range(4)]
        return found(shards, model, None, losses)


def on_side_streams(place: Place) -> Found:
    """Forward and backward on a stream of the user's, another every step; evaluation on the usual
    one between them."""
    model, losses = seeded(Tower), []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            with place.aside():
                loss = place.loss_of(model, step)
                if step % 2:
                    loss.backward()
            if step % 2 == 0:
                loss.backward()
            with torch.no_grad():
                losses.append(place.loss_of(model, 70 + step))
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        return found(shards, model, optim, losses)


def two_streams_one_backward(place: Place) -> Found:
    """A unit is used on two streams before the one backward of both."""
    model, losses = seeded(Tower), []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            with place.aside():
                first = place.loss_of(model, step)
            loss = first + place.loss_of(model, 30 + step)
            with place.aside():
                loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        return found(shards, model, optim, losses)


def after_exceptions(place: Place) -> Found:
    """Forwards that raise in the middle, and a backward that does; training goes on."""
    model, losses = seeded(Tower), []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            handle = model.layers[step % 3].down.register_forward_hook(fail)
            with contextlib.suppress(ZeroDivisionError):
                place.loss_of(model, 90 + step)
            handle.remove()
            if step == 2:
                with contextlib.suppress(ZeroDivisionError):
                    Raises.apply(place.loss_of(model, 95)).backward()
                optim.zero_grad()
            loss = place.loss_of(model, step)
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        return found(shards, model, optim, losses)


def loaded_while_copies_are_pending(place: Place) -> Found:
    """Weights are replaced while the device may still be reading the old ones; what was computed
    before stays so."""
    model, outputs = seeded(Tower), []
    others = [seeded(Tower, seed).state_dict() for seed in (5, 6)]
    # a copy of them would wait for the device
    tokens, targets = (each.to(place.device) for each in batch(0))

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    with (
        place.open(model, is_trained=False) as shards,
        torch.no_grad(),
    ):
        for other in others:
            outputs.append(loss())
            model.load_state_dict(other)
            outputs.append(loss())
        return found(shards, model, None, outputs)


def saved_and_resumed(place: Place) -> Found:
    model, losses = seeded(Tower), []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            losses.append(_step(place, model, optim, step))
        tiermem.checkpoint.save(shards, optim, place.folder / "saved", tag="two", copy=True)
        for step in range(2, 4):
            losses.append(_step(place, model, optim, step))
    model = seeded(Tower, 9)
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        tiermem.checkpoint.load(shards, optim, place.folder / "saved")
        for step in range(2, 4):
            losses.append(_step(place, model, optim, step))
        result = found(shards, model, optim, losses)
    assert result["losses"][2:4] == result["losses"][4:6]
    return result


def state_dicts_moved(place: Place) -> Found:
    """The model's and the optimizer's state dicts, taken from one sharded model and put into
    another."""
    first, second, losses = seeded(Tower), seeded(Tower, 3), []
    with place.open(first) as shards:
        optim = tiermem.AdamW(first.parameters(), lr=1e-2)
        losses += [_step(place, first, optim, step) for step in range(2)]
        model_state, state = values_of(first.state_dict()), copy.deepcopy(optim.state_dict())
    with place.open(second) as shards:
        optim = tiermem.AdamW(second.parameters(), lr=1e-2)
        second.load_state_dict(model_state)
        optim.load_state_dict(state)
        losses += [_step(place, second, optim, step) for step in range(2, 4)]
        return found(shards, second, optim, losses)


def dropout(place: Place, reentrant: bool) -> Found:
    """Random numbers of the device; checkpointing computes the same ones again."""
    model, losses = seeded(lambda: models.ShortTower(checkpoint=reentrant)), []
    for layer in model.layers:
        layer.norm = nn.Sequential(layer.norm, nn.Dropout(0.3))
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(4)
        for step in range(3):
            losses.append(_step(place, model, optim, step))
        return found(shards, model, optim, losses)


def called_by_parts(place: Place) -> Found:
    """Submodules called by themselves, in another order than the model's."""
    model, losses = seeded(Tower), []
    x = torch.randn(3, 31, generator=torch.Generator().manual_seed(1)).to(place.device)
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            y = model.layers[2](model.layers[0].up(x)[:, :31]) + model.layers[1](x)
            loss = model.head(y).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad(set_to_none=step == 1)
            losses.append(loss.detach())
        return found(shards, model, optim, losses)


def pageable_copies(place: Place) -> Found:
    """How many copies of weights to the device come from memory that is not pinned: none."""
    model = seeded(Tower)
    with place.open(model, is_trained=False), torch.no_grad():
        tokens = batch(0)[0].to(place.device)
        before = torch.sim.copies()["num_pageable"] if place.device != "cpu" else 0
        for _ in range(2):
            model(tokens)
        after = torch.sim.copies()["num_pageable"] if place.device != "cpu" else 0
    return {"pageable copies": after - before}


def offloaded(place: Place, home: Tier, reentrant: bool, num_blocks: int = 4) -> Found:
    """Inputs of checkpointed blocks rest elsewhere: two forwards before one backward, a backward
    that raises, a graph that is kept."""
    model, losses = (
        seeded(lambda: models.ShortTower(checkpoint=reentrant, num_blocks=num_blocks)),
        [],
    )

    def loss_of(step: int) -> torch.Tensor:
        # 79,360 bytes
        tokens, targets = (each.to(place.device) for each in batch(step, samples=16, length=40))
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    with place.open(model, activations=home) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            handle = model.layers[-1].down.register_full_backward_pre_hook(
                lambda *given: fail(*given, None)
            )
            with contextlib.suppress(ZeroDivisionError):
                loss_of(80 + step).backward()  # its graph is dropped while an input comes
            handle.remove()
            first, second = loss_of(step), loss_of(30 + step)
            if step % 2:
                (first + second).backward()
            else:
                first.backward(retain_graph=True)
                first.backward()
            optim.step(max_norm=0.5)
            optim.zero_grad()
            losses += [first.detach(), second.detach()]
        return found(shards, model, optim, losses)


def activations_on_host(place: Place) -> Found:
    return offloaded(place, Tier.HOST, reentrant=False)


def activations_on_nvme(place: Place) -> Found:
    # more than there are buffers
    return offloaded(place, Tier.NVME, reentrant=False, num_blocks=10)


def activations_of_reentrant_blocks(place: Place) -> Found:
    return offloaded(place, Tier.HOST, reentrant=True)


def _step(place: Place, model: nn.Module, optim: tiermem.AdamW, step: int) -> torch.Tensor:
    loss = place.loss_of(model, step)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


def seen_from_outside(place: Place) -> Found:
    """Between backward and step gradients are clipped by value, read and written; then averages are
    taken, and exports."""
    model, losses, seen = seeded(Tower), [], {}
    with place.open(model) as shards:
        optim, ema = tiermem.AdamW(model.parameters(), lr=1e-2), tiermem.EMA(model, 0.9)
        for step in range(3):
            loss = place.loss_of(model, step)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 1e-2)
            seen |= {
                f"largest of {name}, {step}": p.grad.abs().max().cpu()
                for name, p in model.named_parameters()
            }
            grad = model.head.weight.grad
            grad.add_(torch.ones_like(grad), alpha=1e-3)
            optim.step()
            optim.zero_grad(set_to_none=step == 0)
            ema.update()
            losses.append(loss.detach())
        with ema.applied(), torch.no_grad():
            losses.append(place.loss_of(model, 3))
        losses.append(place.loss_of(model, 3))
        seen |= values_of(dict(tiermem.export_weights(model)))
        result = found(shards, model, optim, losses) | {
            "seen": seen,
            "averages": ema.state_dict()["averages"],
        }
        ema.close()
        return result


def slept(place: Place) -> Found:
    """Between micro-batches and between steps everything leaves the device, and comes back."""
    model, losses = seeded(Tower), []
    with place.open(model) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            for micro in range(2):
                loss = place.loss_of(model, 7 * step + micro)
                (loss / 2).backward()
                losses.append(loss.detach())
                _sleep(shards)
            optim.step(max_norm=0.5)
            optim.zero_grad()
            _sleep(shards)
        return found(shards, model, optim, losses)


def _sleep(shards: Shards) -> None:
    away = offload(shards, tuple(OffloadState))
    if away is not None:
        reload(shards, away)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        plain, clipped, zeroed, in_bf16, accumulated, checkpointed, checkpointed_reentrantly, tied, frozen, stepped_in_backward,
        clipped_by_torch, autocast, scaled_by_torch, in_fp16,
        read_after_steps, evaluated_between, inference, on_side_streams, two_streams_one_backward, after_exceptions,
        loaded_while_copies_are_pending, sharded_again, batches_there, kept_present, left_and_closed,
        saved_and_resumed, state_dicts_moved, called_by_parts, pageable_copies, widened,
        activations_on_host, activations_on_nvme, activations_of_reentrant_blocks,
        frozen_in_nf4, unfrozen, one_matrix_of_muon,
        seen_from_outside, slept,
        held_and_let_go, held_until_backward_ends, evaluated_aside, branches_stepped_in_backward,
    )
}  # fmt: skip
