"""Do the models and loops that people write do sharded what they do in plain PyTorch, to the bit?

Each program (programs/everyday.py) is run twice through one face (programs/faces.py): plain, and sharded with its
states at each home.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs.everyday import PROGRAMS
from programs.faces import Found, Plain, Sharded, compare, run
from programs.homes import MAIN, policy_of


@pytest.fixture(scope="module")
def plain() -> dict[str, Found]:
    return {}


@pytest.mark.parametrize("home", MAIN)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_in_plain_pytorch(
    name: str, home: str, plain: dict[str, Found], tmp_path: Path
) -> None:
    if name not in plain:
        plain[name] = run(PROGRAMS[name], Plain())
    assert compare(run(PROGRAMS[name], Sharded(policy_of(home, tmp_path))), plain[name]) == []
