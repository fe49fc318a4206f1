"""Floor 1: tensors at rest and on the move.

    native     the binding to floor 0: map, queue, workers, kernels
    extents    which bytes of a line of bytes nobody holds
    arena      one allocation of HOST memory, slots and pools
    tier       a place bytes can rest
    files      folders, locks and segments on NVMe paths
    record     what happened when
    move       bytes on their way, as a value
    entry      one named tensor and the states it goes through
    store      named tensors: put, fetch, release
    pipeline   read | compute | write, tile by tile
    bounce     bytes at odd offsets, through small aligned buffers
    reader     byte ranges of somebody else's file

Imports torch and native. Knows no module, gradient, rank or optimizer.
"""
