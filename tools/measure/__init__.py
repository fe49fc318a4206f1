"""Measurements: what this machine has and what it reaches.

Files in order: each imports only files before it.

    machine         facts of this machine, and how long its drives last
    files           files that measurements of a disk read and write
    sustained       a disk's rate past its fast cache
    gpu_link        copies between host memory and an accelerator
    gpu_trace       a training under torch's profiler
    small_training  a small model in any place, timed
"""
