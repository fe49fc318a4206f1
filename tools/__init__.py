"""Floor 3: what a person runs. The `tiermem` command, its pictures and its peers.

    cli            the command line: `tiermem train`, `check`, `bench`
    train          `tiermem train`, from options to pictures          check        `tiermem check`: what this machine offers
    train_config   options -> DeepSpeed-style config                  bench_step   the optimizer step beside its roofline
    presets        shapes of models                                   byte_size    "1250MiB" <-> bytes
    corpus         text files as tokens                               dataset      the same, as torch sees it
    job            what a trainer is told                             budget       host memory of the store, by arithmetic
    memory_limit   a cap that the kernel holds, or a watch            process_tree resident memory of a process and its children
    launcher       one process under a cap, to the reason of its end  channel      what it says meanwhile: lines over a pipe
    trainer        the training loop, inside the capped process       counts       our bytes beside the kernel's
    disk_rate      the disk's ceiling, measured now                   progress     what a person sees while it runs
    run_record     what a run told, kept as runs/<id>/run.json        reports      tables
    timeline       its events, as lanes and rows                      plots, chrome_trace   its pictures
    peers          the same run by other means                        peer_main    their loop, a script of its own
    peer_plain     PyTorch with everything in memory                  peer_deepspeed   ZeRO-3 with offload

Nothing here imports torch before it must: the launcher stays small, and what is measured is the trainer alone.
"""
