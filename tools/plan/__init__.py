"""Plans: what a training takes of every tier, and how long its steps last.

Files in order: each imports only files before it.

    picture     the memory and the maths of a UNet on one picture
    budget      what a process and activations take of a memory, and what they leave to a plan
    planned     the library's own plan of a scenario
    prediction  the predicted seconds and bytes of a training
    pretrained  the plan of a model of the hub or of a folder, for `tiermem sft`
    card        what an accelerator's memory leaves to a plan
    settle      what a run leaves open, chosen for this machine
    seen        what runs took from their disks
    speed       the rates that a plan is made with
    paper       the ZeRO-Infinity paper's table
    plan        `tiermem plan`: tables and advice
"""
