"""What every other package of the floor uses: tiers, ranges, errors, and the binding to floor 0.

Files in order: each imports only files before it.

    tier          the tiers DEVICE, HOST and NVME
    ranges        byte ranges, sets of free ranges, columns of numbers
    proc          what files of /proc and /sys say
    side_threads  threads beside the caller's, which its interrupts do not harm
    grad_mode     calls with autograd on or off, as it was after every interrupt
    errors        errors of failed checksums; advice about system errors
    parts         the tensors and the rule of one optimizer step
    engines       the I/O engines by name
    native        the binding to floor 0: map, queue and its settings, workers, kernels
    tile_program  the binding of native step programs
"""
