"""Optimizers: the step over states that rest on a tier.

tiles     the states of sharded parameters, cut into tiles: read, stepped, written
adam      AdamW and Adam as torch optimizers, for sharded and ordinary parameters alike
scaling   the loss scale of fp16
"""
