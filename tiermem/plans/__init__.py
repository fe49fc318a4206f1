"""Plans: the bytes of every tier before anything is allocated, and the plan that the budgets hold.

Files in order: each imports only files before it.

    plan         bytes on every tier, computed before allocation
    budget       chooses the plan that the budgets hold
    pools        the store of a plan, and its buffers, carved from the arena
    activations  bytes of a forward and a backward, by a run on tensors without values
    agreement    compares program, model and policy over ranks
"""
