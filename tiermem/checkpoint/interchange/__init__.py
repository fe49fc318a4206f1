"""Interchange: checkpoints of other systems become ours, and ours become theirs.

in    foreign.py         what a checkpoint of another system holds    opening.py      which reader a path is for
      from_torch.py      state dicts, safetensors                     torch_files.py  torch.save's files, nothing executed
      from_deepspeed.py  ZeRO-3 folders of any number of ranks
      from_dcp.py        torch.distributed.checkpoint                 dcp_files.py    its files, nothing executed
      write.py           a Foreign as a tiermem checkpoint            scalars.py      its counters and scale
out   weights_of.py      an opened step's weights, in one dtype
      to_weights.py      safetensors and torch files, in shards
      to_dcp.py          torch.distributed.checkpoint, optimizer states included
both  groups.py          parameter groups
"""
