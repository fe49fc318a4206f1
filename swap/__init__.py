"""Floor 1: stores tensors on tiers and moves them. It imports torch and native; it knows no module,
gradient or rank.

Packages in order: each imports only packages before it.

    base/     tiers, ranges, errors, the parts of an optimizer step, the binding to floor 0
    memory/   devices, memory nodes, slots carved from few allocations
    kernels/  the optimizer step on a device
    disk/     files that survive a crash, the folder of a run, queues
    store/    TensorStore: named tensors at rest and on the move
    program/  tiles that are read, stepped and written one after the other
"""
