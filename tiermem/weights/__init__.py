"""Weights: what a parameter shows, where its unit rests, and when the unit is fetched.

Files in order: each imports only files before it.

    resting_tensor  a tensor of the user's whose values rest elsewhere
    absent          what a parameter shows while its values are not in memory
    backward_marks  hooks on tensors that tell how far backward is
    step_run        the step under way, perhaps under the next forward; whether states are whole
    unit_memory     a unit's memory; buffers, streams and threads that units share
    pages           which bytes of a unit are there, where its experts come by rows
    unit_state      a unit's state machine and transfers
    values          reads and writes weights where they rest; state dicts
    prefetcher      learns the order of uses; decides which units to fetch and to evict
"""
