"""The optimizer step on a device, beside the native kernels for the CPU.

Files in order: each imports only files before it.

    torch_step      the optimizer step in torch operations, on any device
    triton_step     the same as one Triton kernel, on CUDA and ROCm
    triton_sums     sums of squares for the norm, likewise
    device_kernels  the kernels that step states and add squares on a device
"""
