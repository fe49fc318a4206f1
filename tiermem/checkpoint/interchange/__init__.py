"""Interchange: checkpoints of other systems become ours, and ours become theirs.

in    foreign           what a checkpoint of another system holds, and parameter groups in both directions
      from_torch        state dicts and safetensors            from_deepspeed    ZeRO-3 folders of any number of ranks
      from_dcp          torch.distributed.checkpoint           write             a Foreign as a tiermem checkpoint
out   export            weights as safetensors and torch files, everything as torch.distributed.checkpoint
"""
