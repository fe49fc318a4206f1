"""Ranks: their groups, their collectives, and how one that is gone is found. No file here knows a
tensor of a model.

Files in order: each imports only files before it.

    heartbeat    datagrams by which ranks know that the others run
    failures     finds the rank that is gone, and ranks whose collectives differ
    topology     which ranks share a tensor's parts, and their process groups
    joining      creates the process group from the launcher's environment
    collectives  calls that all ranks make together
"""
