"""Layers and a loss that take less memory than torch's.

Files in order: each imports only files before it.

    tiled         layers cut into tiles
    chunked_loss  a language model's loss, chunk by chunk
"""
