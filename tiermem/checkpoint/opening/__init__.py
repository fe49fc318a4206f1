"""Opening: a saved step, verified, and put where a model rests.

a step       streams   a state's bytes     verified  blocks, read ahead and compared     damage    what differs
             source    it, opened          custom    its weights as a mapping
in a model   fitting   names and shapes    filling   formats                             restore   where it rests
             resuming  groups, generators  ordinary  what is stepped beside the model    loading   all of it
"""
