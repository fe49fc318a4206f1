"""Interchange: checkpoints of other systems become ours, and ours become theirs.

in    foreign.py         what a checkpoint of another system holds    write.py      which reader a path is for
      from_torch.py      state dicts, safetensors                     from_torch.py  torch.save's files, nothing executed
      from_deepspeed.py  ZeRO-3 folders of any number of ranks
      from_dcp.py        torch.distributed.checkpoint                 from_dcp.py    its files, nothing executed
      write.py           a Foreign as a tiermem checkpoint            scalars.py      its counters and scale
out   export.py      an opened step's weights, in one dtype
      export.py      safetensors and torch files, in shards
      export.py          torch.distributed.checkpoint, optimizer states included
both  foreign.py          parameter groups
"""
