"""Interchange: checkpoints of other systems become ours, and ours become theirs.

foreign.py          what a checkpoint of another system holds          torch_files.py   torch.save's files, nothing executed
from_torch.py  from_deepspeed.py                                        their readers
"""
