"""The engine: `initialize` and the Engine that it returns. It offers DeepSpeed's interface over
`tiermem.shard`.

    engine, optimizer, loader, scheduler = tiermem.initialize(model=model, config=cfg)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Files in order: each imports only files before it.

    choice        the optimizer that an engine builds; what must be equal on all ranks
    room          free memory, and the fastest policy that it holds
    second_plan   goes over to the fastest plan that measured memory has room for
    facts         micro-batches, losses, phase times; the answers that launchers and trainers need
    sharding      shard: the same without a config and without an engine
    adapters      what a model with PEFT adapters saves
    checkpoints   save_checkpoint, load_checkpoint, save_16bit_model
    engine        Engine: forward, backward, step, and the end
    start         initialize: config, process group, engine, loader

tiermem.run.access generates text with all units in memory. tiermem.schedule holds the learning-rate
schedules.
"""

from __future__ import annotations

from tiermem.engine.engine import Engine as Engine
from tiermem.engine.start import initialize as initialize
