"""Floor 1: tensors at rest and on the move. Imports torch and native; knows no module, gradient, rank or optimizer.

Files in order: each imports only files before it.

    tier          a place that bytes can rest
    ranges        ranges of bytes, sets of them, columns of numbers
    errors        bytes that fail their checksum; what to do about a system error
    durable       syncs, renames, removals and small files that last
    parts         what one optimizer step works on, and by which rule
    native        the binding to floor 0: map, queue and its settings, workers, kernels
    accelerator   all that tiermem knows of a device that is not the CPU
    torch_step    the step in torch operations, on any device
    arena         one allocation of HOST memory, slots and pools
    direct        O_DIRECT: alignment, and what a folder offers
    paths         folders for NVMe, with caps and weights
    run_folder    the folder of one run on one path, its lock, and what dead runs left
    files         one preallocated segment per path, extents dealt over them
    queue         one native queue per path behind one face; counts, records
    passes        one file's bytes moved in one pattern and timed; weights of paths
    checksum      CRC-32C of entries: taken when they are written, compared when they are read
    move          bytes on their way, as a value
    entry         one named tensor, its state machine, its extents and what a freeze holds of them
    resources     a store's memory, files and queues, and its moves in flight
    store         TensorStore: put, fetch, release; byte ranges; freezes
    pipeline      read | compute | write, tile by tile
    stream        files in other formats, through a few aligned buffers
"""
