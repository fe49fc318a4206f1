"""Plans: what a training takes of every tier, and how long its steps last.

Files in order: each imports only files before it.

    budget      what a process and activations, those of a UNet on a picture too, take of a memory
    planned     a card's memory, and the library's own plan of a scenario
    prediction  the predicted seconds and bytes of a training
    pretrained  the plan of a model of the hub or of a folder, for `tiermem sft`
    settle      what a run leaves open, chosen for this machine, and said
    seen        what runs took from their disks
    speed       the rates that a plan is made with
    paper       the ZeRO-Infinity paper's table
    plan        `tiermem plan`: tables and advice
"""
