"""Benchmarks: the disk, the kernels, an optimizer step, ranks, precisions, an accelerator. Each is a command of its own."""
