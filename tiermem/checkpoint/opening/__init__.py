"""Opening: a saved step, verified, and put where a model rests.

verified   the bytes of a state, read ahead and compared     source     a step, opened
restore    weights and states put in place                   loading    with optimizer, generators and schedules
"""
