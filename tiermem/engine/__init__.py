"""The engine: `initialize` and what it returns, the face that DeepSpeed users know over the machinery of `tiermem.shard`.

    engine, optimizer, loader, scheduler = tiermem.initialize(model=model, config=cfg)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Files in order: each imports only files before it.

    choice        which optimizer it will build, and what ranks must have given alike
    facts         micro-batches, losses, phase times, and what launchers and trainers ask of it
    checkpoints   save_checkpoint, load_checkpoint, save_16bit_model
    engine        Engine: forward, backward, step, and the end
    start         initialize: config, process group, engine, loader

Generation with all units in memory: tiermem.zero.access. Learning rates: tiermem.schedule.
"""

from __future__ import annotations

from tiermem.engine.engine import Engine as Engine
from tiermem.engine.start import initialize as initialize

__all__ = ["Engine", "initialize"]
