"""Instruments: programs that judge tiermem itself, beside peers and yardsticks. `make bench RUN="overlap --path DIR"` runs one.

overlap, iterations   an iteration whose step goes on under the next forward, beside a bare loop of its least bytes
ranks                 a step on several ranks beside FSDP2's
curves                losses of a small model with its states in several precisions
gpu, gpu_*            a machine's accelerator: `make gpu`
parity                docs/parity.md: `make report`
peers/                the same training by other systems: `make bench RUN="peers --preset 151m"`
"""
