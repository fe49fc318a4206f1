"""Floor 3: what a person runs. The `tiermem` command, its pictures and its peers.

    cli            the command line: `tiermem train`, `tiermem check`
    byte_size      "1250MiB" <-> bytes
    memory_limit   a cap on memory that the kernel holds, or a watch where it cannot
    process_tree   resident memory of a process and its descendants
    channel        what a capped process tells its launcher: lines over a pipe
    launcher       one process under a cap, from exec to the reason of its death
    presets        shapes of models            corpus     text files as tokens
    train_config   options -> config           budget     host memory for the store, by arithmetic
    job            what a trainer is told      trainer    the loop, inside the capped process
    disk_rate      the disk's ceiling          progress   what a person sees while it runs
    run_record     runs/<id>/run.json          plots, chrome_trace   pictures of a run
    train          `tiermem train`, from options to pictures
    peers          the same run in plain PyTorch (peer_plain) and DeepSpeed (peer_deepspeed)
    check          `tiermem check`: what this machine offers

Nothing here imports torch before it must: the launcher stays small, and what is measured is the trainer alone.
"""
