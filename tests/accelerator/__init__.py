"""A simulated accelerator: a torch device "sim" without a GPU, on which mistakes of streams and memory show.

device.py     load(), and the module torch.sim           simulator/  the device itself, in C++
fixture.py    the pytest fixture `sim`                    build.py    compiles it, once per state of the sources
site/         in PYTHONPATH, `import torch` loads it      README.md   what it simulates, and what it does not
"""
