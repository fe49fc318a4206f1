"""Saving: durable steps of a sharded model, which are the store's own files, and complete copies of them.

what is saved    stretch  elements in one range of bytes    capture   a rank's stretches      scalars  groups, generators
                 resting  those on NVMe, as arrays          pieces    those in memory, written
                 rows     pieces as arrays                  blocks    checksums by MiB        content  all of it
how it lasts     commit   where states rest                 copying   ranges into a copy      copies   complete, behind
                 publish  manifest, pointer, latest
                 saver    tags and steps, for those who call
what goes        predecessors  earlier runs' tags           unfinished  what killed saves left
what stays       unharmed      the step that a corruption left whole
"""
