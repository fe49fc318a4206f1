"""Integrations: other libraries' training loops over sharded models. Each module imports its
library; nothing here does.

    choice        the policy for a model that a training loop asks for: given, from a config, or computed from the memory
    arguments     a DeepSpeed-style config beside transformers' TrainingArguments
    pretrained    weights of transformers' models, streamed from and to safetensors
    diffusion     components of diffusers' pipelines
    models        from_pretrained: builds a model and streams its weights to their tier
    peft          merges adapters into a sharded base model
    huggingface   TiermemTrainer: transformers' Trainer, and the mixin for trainers that inherit from it
    accelerate    prepare: an Accelerator that drives a sharded model
    lightning     TiermemStrategy: Lightning's Trainer over a sharded module
    as_deepspeed  answers for the modules of DeepSpeed that Hugging Face's libraries import (deepspeed_names: the first of them)

Files in order: each imports only files before it.
"""
