"""`python -m tiermem.as_deepspeed SCRIPT ...` runs a script that imports deepspeed, with tiermem
answering."""

from __future__ import annotations

from tiermem.integrations.as_deepspeed import main

if __name__ == "__main__":
    main()
