"""Floor 3: what a person runs. The `tiermem` command, its pictures and its peers.

    cli            the command line: `tiermem train`, `check`, `tune`, `bench`
    train          `tiermem train`, from options to pictures          check        `tiermem check`: what this machine offers
    train_config   options -> DeepSpeed-style config                  bench_step   the optimizer step beside its roofline
    presets        shapes of models                                   byte_size    "1250MiB" <-> bytes
    corpus         text files as tokens                               dataset      the same, as torch sees it
    job            what a trainer is told                             budget       host memory of the store, by arithmetic
    memory_limit   a cap that the kernel holds, or a watch            process_tree resident memory of a process and its children
    launcher       one process under a cap, to the reason of its end  channel      what it says meanwhile: lines over a pipe
    trainer        the training loop, inside the capped process       counts       our bytes beside the kernel's
    trained_model  the model that it trains, built at home            calibrate    a model's maths, from a few of its blocks
    prediction     what a training is expected to take                chosen       and what its plan is chosen by
    heap           its C heap, while it is built and while it is trained
    disk_rate      the disk's ceiling, measured now                   progress     what a person sees while it runs
    run_record     what a run told, kept as runs/<id>/run.json        reports      tables
    device_memory  what it takes of its accelerator's memory
    timeline       its events, as lanes and rows                      plots, chrome_trace   its pictures
    tune           `tiermem tune`: what suits some disks, measured    io_grid      the settings that are worth trying
    halving        the best of many candidates in a given time        step_mix     what a step's bytes cost with some settings
    tuned_file     the config section that it writes                  endurance    bytes written, and a drive's life
    bench_io       `tiermem bench io`: how fast a disk is             sweep        settings in turn, loop after loop
    bench_files    its files, without names                           sweep_job    what a rank is told, and what it answers
    sweep_ranks    the processes that measure                         sweep_rank   one of them
    sweep_tensors  tensors through the store, beside plain passes     sweep_rows   figures of each setting, the best of a mode
    sweep_report   its table, notes, JSON and CSV                     heatmap      its picture
    sweep_witnesses  others' figures in the same loops                bare_loop    a yardstick, driven line by line
    bench_ranks    a step on several ranks beside FSDP2's            rank_steps   what each of them runs
    fio            somebody else's benchmark                          peer_aio     DeepSpeed's aio_handle as a yardstick
    knee           where a series of rates drops for good             machine      the facts behind every figure
    outputs        files that a command may overwrite                 stopping     SIGTERM as Ctrl-C
    stepped_model  what `bench step` steps                            step_roofline   the same bytes without arithmetic
    step_report    its tables                                         tile_timeline   its picture
    peers          the same run by other means                        peer_main    their loop, a script of its own
    peer_plain     PyTorch with everything in memory                  peer_deepspeed   ZeRO-3 with offload

Nothing here imports torch before it must: the launcher stays small, and what is measured is the trainer alone.
"""
