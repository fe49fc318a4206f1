"""Training: from options to pictures.

Files in order: each imports only files before it.

    training     the training loop, in the capped process
    fine_tuning  TRL's script of supervised fine-tuning, in the capped process
    trainer      the program of that process
    train        `tiermem train` and `tiermem sft`: the launcher's side
"""
