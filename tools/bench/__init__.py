"""Benchmarks: the disk, an optimizer step, the kernels. Each is a command of its own.

Files in order: each imports only files before it.

    io_ranks        a setting of the queue, measured on one or several ranks
    io_report       rows, CSV and picture of `bench io`
    peer_operators  the program that runs DeepSpeed's operators; it imports nothing of tiermem
    witnesses       fio, a bare loop and a peer on the same files
    io              `tiermem bench io`
    stepped_model   a model that is stepped, and the roofline of its steps
    step            `tiermem bench step`
    adam            `tiermem bench adam`
"""
