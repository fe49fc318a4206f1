"""Peers: other systems that do the same job, each in a process of its own; their scripts import
nothing of tiermem."""
