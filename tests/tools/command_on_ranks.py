"""Launched by test_train_on_ranks.py: the command `tiermem` on a rank."""

import sys

from tiermem.tools.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])
