"""Floor 3: the `tiermem` command, its pictures and its benchmarks.

    options, cli   a dataclass of options for every command; the command line that cli makes from them
    train          `tiermem train`, from options to pictures
      train_job                      the config and the saved step that options select; the job
      launcher, memory_limit         one process under a memory cap, its job and its channel
      trainer, training              the program of the capped process; its training loop
      corpus, presets                text as tokens; shapes and sizes of models
      prediction                     the predicted seconds and bytes of a training
      run_record, reports, plots     the record of a run: runs/<id>/run.json, tables, pictures
    plan           `tiermem plan`: tables and advice
      planned                        the budget under a cap; the library's own plan of a scenario
      speed, seen                    the rates that it plans with; what runs took from their disks
    check, machine `tiermem check`: facts and measurements of this machine
    tune           `tiermem tune`: the best settings of the queue for some disks
    checkpoints    `tiermem fsck`, `inspect`, `import`, `export`
    words          shared by all commands: byte sizes, parsing and checks of options, output files
    bench/         `tiermem bench`: io, adam, step, overlap, ranks, curves, gpu
      peers/       other systems that do the same job

cli imports the module of a command when the command is given. What `train` imports does not import torch: the launcher stays
small, and measurements of memory cover the trainer only.
"""
