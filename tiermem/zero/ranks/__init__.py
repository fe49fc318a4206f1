"""Ranks: who shares what, and what they call together.

joining      the ranks that a launcher has started make a group
rollcall     which rank is gone                     traffic      what was handed to collectives
watch        where ranks went different ways        messages     what CPUs send each other directly
topology     which ranks share parts                mesh         groups of ranks: MiCS, hpZ, nodes
agreement    ranks were given the same              collectives  what ranks call together
meeting      ranks were given the same group
quantised    values as 8-bit blocks                 packed       gathers and reductions that send such blocks
"""
