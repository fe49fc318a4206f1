"""Prints the requirements of one extra or group of pyproject.toml, so that tools install without
the package (and torch)."""

import re
import sys
from pathlib import Path


def read_extra(pyproject: Path, extra: str) -> list[str]:
    """Returns the requirements of `extra`; raises KeyError. No TOML parser: Python 3.10 has
    none."""
    found = re.search(rf"^{extra} = \[(.*)\]$", pyproject.read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise KeyError(f"{pyproject}: no extra {extra!r} on one line")
    return re.findall(r'"([^"]+)"', found.group(1))


if __name__ == "__main__":
    print(" ".join(read_extra(Path(__file__).parent.parent / "pyproject.toml", sys.argv[1])))
