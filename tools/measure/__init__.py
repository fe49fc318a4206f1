"""Measurements: what this machine has and what it reaches.

Files in order: each imports only files before it.

    machine         facts of this machine, and how long its drives last
    files           files that measurements of a disk read and write
    sustained       a disk's rate past its fast cache; the rates of several disks
    gpu_link        copies between host memory and an accelerator
"""
