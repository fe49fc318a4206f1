"""Floor 1: stores tensors on tiers and moves them. It imports torch and native; it knows no module, gradient or rank.

Files in order: each imports only files before it.

    tier          the tiers DEVICE, HOST and NVME
    ranges        byte ranges, sets of free ranges, columns of numbers
    errors        errors of failed checksums; advice about system errors
    durable       syncs, renames, removals and small files that survive a crash
    parts         the tensors and the rule of one optimizer step
    native        the binding to floor 0: map, queue and its settings, workers, kernels
    tile_program  the binding of native step programs
    accelerator   all code about devices other than the CPU
    nodes         memory nodes (NUMA): which cores and which memory are near a rank
    torch_step    the optimizer step in torch operations, on any device
    triton_step   the same as one Triton kernel, on CUDA and ROCm
    triton_sums   sums of squares for the norm, likewise
    device_kernels  the kernels that step states and add squares on a device
    arena         one allocation of HOST memory, its slots and pools
    direct        O_DIRECT: alignment, preallocation, facts about a folder
    paths         folders for NVMe with caps and weights
    run_folder    the folder of one run on one path, its lock file, folders of killed runs
    files         one preallocated segment per path, extents allocated over them
    queue         one native queue per path behind one interface; counters, events
    passes        timed reads and writes of one file; weights of paths
    checksum      CRC-32C of entries: computed at each write, compared at each read
    move          a transfer in flight, as a value
    device_copy   a fetched tensor's copy in an accelerator's memory
    device_memory  DEVICE memory, carved from few allocations
    entry         one named tensor, its state machine, its extents, its frozen parts
    resources     a store's memory, files, queues and moves in flight
    places        byte ranges of an entry at rest and in memory, and their transfers
    store         TensorStore: put, fetch, release; byte ranges; freezes
    tile_plan     a tile as a step program gets it
    run_read      a read of bytes that a step program changes
    program       read | check | step | sum | write, tile by tile
    stream        files of other formats, moved through a few aligned buffers
"""
