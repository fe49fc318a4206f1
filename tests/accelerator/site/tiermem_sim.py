"""What an installed plugin of a device would be: with this folder in PYTHONPATH, `import torch`
loads the simulated device.

Torch calls `autoload`, which the entry point in tiermem_sim-1.0.dist-info names.
"""

from __future__ import annotations

import sys
from pathlib import Path


def autoload() -> None:
    tests = str(Path(__file__).resolve().parents[2])
    sys.path.append(tests)
    try:
        from accelerator import device
    finally:
        sys.path.remove(tests)
    device.load()
