"""Floor 3: what a person runs. The `tiermem` command, its pictures and its benchmarks.

    options, cli   every command's options, a dataclass each, and the command line that is made of them
    train          `tiermem train`, from options to pictures
      train_options, train_job       the config and the saved step that options stand for, and the job
      launcher, memory_limit         one process under a cap that the kernel holds, its job and its channel
      trainer                        the training loop, inside the capped process
      corpus, presets                text as tokens, shapes of models
      prediction                     what a training is expected to take
      run_record, reports, plots     what a run told: runs/<id>/run.json, tables, pictures
    plan           `tiermem plan`; planned: a scenario put through the library's own plan; plan_report: tables and advice
    check, machine `tiermem check`: what this machine offers
    tune, step_mix `tiermem tune`: settings of the queue that suit some disks
    checkpoints    `tiermem fsck`, `inspect`, `import`, `export`
    words          what every command shares: byte sizes, how options are said and checked, files that it may write
    bench/         `tiermem bench`: io, adam, step, ranks, curves, gpu
      peers/       other systems that do the same job

Nothing here imports torch before it must: the launcher stays small, and what is measured is the trainer alone.
"""
