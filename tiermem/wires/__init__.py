"""Wires: parts of units on their way between ranks.

Files in order: each imports only files before it.

    gather  brings the shards of all ranks together
    packed  gathers and reductions of blocks
    reduce  adds up buckets of gradients over ranks
"""
