"""A model in use: hooks around its modules, and the sharded model as a whole.

Files in order: each imports only files before it.

    activations    moves inputs of checkpointed blocks to HOST or NVMe
    chain          finds the blocks that a model runs one after the other
    memory_errors  what to change where an accelerator has no memory left
    hooks          connects forward and backward of modules to the rest
    init_params    parameters while a model is built
    move_to_home   moves weights to where they rest
    next_plan      plans for parameters that are unfrozen, and for states that go elsewhere
    fill           units that stay where measured memory leaves room
    shards         a sharded model
    layerwise      a step's micro-batches, block by block
    kv_cache       bytes of a generation's keys and values
    access         whole parameters: GatheredParameters, generation
    init           zero.Init
"""
