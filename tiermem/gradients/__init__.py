"""Gradients: from autograd to the tier where they rest until the step.

Files in order: each imports only files before it.

    gradient_link   brings gradients from an accelerator to host memory
    gradient_store  keeps gradients until the step
    gradient_norms  sums of squares of gradients, and their scales
    gradients       takes gradients from autograd to that store
"""
