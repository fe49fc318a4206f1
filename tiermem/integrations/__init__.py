"""Integrations: other libraries' training loops over sharded models. Each module imports its library; nothing here does.

    choice        the policy for a model that a training loop asks for: given, from a config, or computed from the memory
    huggingface   TiermemTrainer: transformers' Trainer, and the mixin for trainers that inherit from it

Files in order: each imports only files before it.
"""
