"""TensorStore: named tensors at rest on a tier, and their moves between tiers.

Files in order: each imports only files before it.

    checksum     CRC-32C of entries: computed at each write, compared at each read
    move         a transfer in flight, as a value
    entry        one named tensor, its state machine, its extents, its frozen parts
    resources    a store's memory, files, queues and moves in flight
    places       byte ranges of an entry at rest and in memory, and their transfers
    store        TensorStore: put, fetch, release; byte ranges; freezes
    stream       files of other formats, moved through a few aligned buffers
"""
