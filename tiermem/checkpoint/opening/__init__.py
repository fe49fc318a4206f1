"""Opening: reads a saved step, verifies it, and puts it into a model.

verified   reads the bytes of a state ahead, compares checksums     source     an opened step
restore    puts weights and states in place                         loading    also optimizer, generators and schedules
"""
