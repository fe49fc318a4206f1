"""Opening: a saved step, verified, and put where a model rests.

streams    a state's bytes     damage     what is not as it was saved     verified reads ahead and compares
source     an opened step
fitting    names and shapes    filling    formats                         custom   weights as a mapping
resuming   groups, generators  ordinary   beside the model                restore  where a model rests
loading    all of it
"""
