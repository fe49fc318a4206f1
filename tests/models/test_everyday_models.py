"""Do the models and loops that people write do sharded what they do in plain PyTorch, to the bit?

Each program (programs/everyday.py) is run twice through one face (programs/faces.py): plain, and
sharded with its states at each home.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import towers
from programs.everyday import PROGRAMS
from programs.faces import Found, Plain, Sharded, compare, run
from programs.homes import MAIN, policy_of
from programs.models import ShortTower
from programs.twins import is_absent

import tiermem

# Of towers each pair of any two values is in `make test`, all combinations in `make test-all`.
OF_TOWERS = [
    pytest.param(
        name, home, in_backward, marks=[pytest.mark.slow] if (i + j + in_backward) % 2 else []
    )
    for i, name in enumerate(towers.PROGRAMS)
    for j, home in enumerate(("host", "nvme"))
    for in_backward in (False, True)
]
OF_OTHERS = [
    (name, home, False) for name in PROGRAMS if name not in towers.PROGRAMS for home in MAIN
]


@pytest.fixture(scope="module")
def plain() -> dict[str, Found]:
    return {}


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("name", "home", "step_in_backward"), [*OF_TOWERS, *OF_OTHERS])
def test_a_program_does_what_it_does_in_plain_pytorch(
    name: str, home: str, step_in_backward: bool, plain: dict[str, Found], tmp_path: Path
) -> None:
    if name not in plain:
        plain[name] = run(PROGRAMS[name], Plain())
    sharded = Sharded(policy_of(home, tmp_path, step_in_backward=step_in_backward))
    assert compare(run(PROGRAMS[name], sharded), plain[name]) == []
    assert (sharded.read_bytes > 0) == (home == "nvme")


def test_a_nan_that_was_never_fetched_would_show(tmp_path: Path) -> None:
    """The test above would fail if a unit were missing: released weights are NaN."""
    model = ShortTower()
    with tiermem.shard(model, policy_of("nvme", tmp_path)):
        large = [param for param in model.layers[0].up.parameters() if param.numel() > 50]
        assert large and all(map(is_absent, large))
