"""Files: how they survive a crash, where they lie, and the queues that read and write them.

Files in order: each imports only files before it.

    durable     syncs, renames, removals and small files that survive a crash
    direct      O_DIRECT: alignment, preallocation, facts about a folder
    paths       folders for NVMe with caps and weights
    run_folder  the folder of one run on one path, its lock file, folders of killed runs
    files       one preallocated segment per path, extents allocated over them
    queue       one native queue per path behind one interface; counters, events
    passes      timed reads and writes of one file; weights of paths
"""
