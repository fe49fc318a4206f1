"""Interchange: converts checkpoints of other systems to tiermem's format, and back.

in    foreign           the values of another system's checkpoint; parameter groups in both directions
      from_torch        reads state dicts and safetensors      from_dcp          reads torch.distributed.checkpoint
      from_deepspeed    reads ZeRO-3 folders of any number of ranks
      write             writes a Foreign as a tiermem checkpoint
out   export            writes weights as safetensors and torch files, everything as torch.distributed.checkpoint
      whole             a complete copy of a saved step
"""
