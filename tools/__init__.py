"""Floor 3: the `tiermem` command, its pictures and its benchmarks.

Packages and files in order: each imports only what comes before it.

    words         shared by all commands: byte sizes, parsing and checks of options, output files
    presets       shapes and sizes of models
    mistakes      the answer to a command line that was typed wrongly
    corpus        text as tokens
    measure/      facts and rates of this machine: its disks, its link to an accelerator, a small training
    memory_limit  a cap on the memory of a process, which the kernel holds where it can
    options       a dataclass of options for every command
    job/          what one process under a memory cap is to do, and its channel
    record/       the record of a run: runs/<id>/run.json, tables, pictures
    plan/         `tiermem plan`: the library's own plan of a scenario, its predicted seconds and bytes
    train/        `tiermem train` and `tiermem sft`, from options to pictures
    bench/        `tiermem bench`: io, step, adam
    check         `tiermem check`: what this machine offers
    tune          `tiermem tune`: the best settings of the queue for some disks
    checkpoints   `tiermem fsck`, `inspect`, `import`, `export`
    cli           the command line, made of options

cli imports the module of a command when the command is given. What `train` imports does not import
torch: the launcher stays small, and measurements of memory cover the trainer only. Instruments that
judge tiermem itself are no part of the product: they lie in tests/bench.
"""
