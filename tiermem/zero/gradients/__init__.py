"""Gradients: from autograd to where they rest until the step.

buckets       gradients packed for ranks            reduce        gradients into a rank's part
grad_store    where gradients rest, measured        sharded_grad  what stands in `p.grad` meanwhile
grads         received, reduced, sent home          gradient_put  other values for a gradient
"""
