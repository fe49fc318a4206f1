"""Floor 1: tensors at rest and on the move.

    native        the binding to floor 0: map, queue, workers, kernels
    checksum      CRC-32C of bytes in memory
    extents       which bytes of a line of bytes nobody holds
    arena         one allocation of HOST memory, slots and pools
    tier          a place bytes can rest
    direct        whether a file is read and written past the page cache
    settings      how a queue moves blocks
    paths         folders for NVME, with caps and weights
    probe         what a folder offers
    durable       syncs, renames, removals and small files that last
    run_lock      which process a run's folder belongs to
    run_folder    the folder of one run, and what dead runs leave
    segment       one path's preallocated file
    shares        how many bytes each path gets
    files         the segments of all paths, and extents dealt over them
    queues        one native queue per path, behind one face
    passes        one file's bytes moved in a pattern, and how long that took
    path_weights  paths measured against each other
    record        what happened when
    move          bytes on their way, as a value
    slots         which of an entry's extents holds each of its bytes
    freeze        where bytes lay at one moment
    home          the extents of one entry
    entry         one named tensor and the states it goes through
    pieces        parts of an entry that have a checksum each
    corruption    the error for bytes that are not those that were written
    sums          checksums taken when entries are written, compared when they are read
    freezes       what every freeze holds
    ranges        parts of an entry as transfers, checked
    under_way     moves that have not ended
    host_memory   the arena, and whom to wait for when it is full
    held          memory, files and queues of a store, and their end
    stats         what a store has moved and holds
    range_store   byte ranges of entries, freezes, the store as a whole
    store         named tensors: put, fetch, release
    pipeline      read | compute | write, tile by tile
    bounce        bytes at odd offsets, through small aligned buffers
    reader        byte ranges of somebody else's file

Imports torch and native. Knows no module, gradient, rank or optimizer.
"""
