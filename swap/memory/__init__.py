"""Memory: what a machine has of it, and slots carved from few allocations.

Files in order: each imports only files before it.

    free           what the kernel says is free, of the machine and of cgroups
    accelerator    all code about devices other than the CPU
    nodes          memory nodes (NUMA): which cores and which memory are near a rank
    arena          one allocation of HOST memory, its slots and pools
    device_memory  DEVICE memory, carved from few allocations
"""
