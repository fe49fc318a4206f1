"""Saving: durable steps of a sharded model, which are the store's own files, and complete copies of them.

stretch    elements in one range of bytes     capture   what a rank saves          blocks    checksums by MiB
pieces     ranges of files, summed            scalars   groups, generators         content   what is saved, all of it
publish    manifest, pointer, latest          commit    where states rest          predecessors  earlier runs' tags
copying    ranges into a copy                 copies    complete copies, behind    unharmed  the step a corruption left
saver      tags and steps
"""
