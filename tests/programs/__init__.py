"""Programs: small models and trainings, each once, and the places where their states lie.

models      toy models and their habits           twins       loops, batches, and what must be equal to the bit
"""
