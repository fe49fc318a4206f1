"""The engine: `initialize` and what it returns, the face that DeepSpeed users know over the machinery of `tiermem.shard`.

    engine, optimizer, loader, scheduler = tiermem.initialize(model=model, config=cfg)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Files, in the order in which to read (imports go the same way, downward):

    start           initialize: config, process group, engine, loader
    engine          Engine: forward, backward, step, and the end
    facts           what launchers, trainers and monitors ask of it
    choice          which optimizer it will build                     agreed          what ranks must have given it alike
    casts           dtypes of the model, autocast                     losses          divided and scaled, by whom
    accumulation    which micro-batch ends a step                     phase_times     how long forward, backward and step take
    phases          offload_states, reload_states                     compiled        torch.compile, unit by unit
    saving          save_16bit_model and whole state dicts            checkpoints     load_checkpoint

Generation with all units in memory: tiermem.zero.weights.present. Learning rates and loaders: tiermem.schedule, tiermem.data.
"""

from __future__ import annotations

from tiermem.engine.engine import Engine as Engine
from tiermem.engine.start import initialize as initialize

__all__ = ["Engine", "initialize"]
