"""Do two ranks, each with data of its own, do what two ranks of plain PyTorch do that add up their
gradients, to the bit?

All programs of one list run in one launch (run_on_ranks.py); the lists are all programs there are.
None is left out: a program that asks for what ranks cannot keep to the bit (micro-batches and ranks
added in another order) says so where it asks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import asked, launch
from programs.everyday import PROGRAMS
from programs.homes import MAIN

HERE = Path(__file__).parent
NUM_RANKS = 2
Differences = dict[tuple[str, str], list[str]]

# One of each kind of trouble; what needs the transformers library, or differs from these in little,
# is slow.
COVERING = [
    "convolutions_with_batch_norm",
    "parametrized_weights",
    "experts_in_a_module_dict",
    "odd_parameters",
    "bf16_blocks_with_fp32_norms",
    "shared_modules_and_weights",
    "weights_used_without_calling_their_module",
    "exceptions_in_forward_and_backward",
    "hooks_on_parameters",
    "gradients_of_gradients",
    "two_models_one_frozen_at_a_time",
    "dict, checkpoint False, 2 rounds",
    "dataclass, checkpoint True, 2 rounds",
    "dataclasses_in_and_out",
    "lora_on_a_frozen_bf16_base",
]
COMPILED = ["by call, before sharding, aot_eager", "by call, after sharding, aot_eager"]
REST = [name for name in PROGRAMS if name not in COVERING] + COMPILED


@pytest.fixture(scope="module")
def covered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Differences]:
    names = asked(request, "name")
    return launched([name for name in COVERING if name in names], tmp_path_factory)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> list[Differences]:
    return launched(REST, tmp_path_factory)


def launched(names: list[str], folders: pytest.TempPathFactory) -> list[Differences]:
    nvme = folders.mktemp("nvme")
    found = launch(HERE / "run_on_ranks.py", NUM_RANKS, folders.mktemp("out"), str(nvme), *names)
    assert not list(nvme.iterdir())
    return found


@pytest.mark.sampled(16)
@pytest.mark.parametrize("home", MAIN)
@pytest.mark.parametrize("name", COVERING)
def test_a_program_does_on_two_ranks_what_plain_pytorch_does(
    name: str, home: str, covered: list[Differences]
) -> None:
    for differences in covered:
        assert differences[name, home] == []


@pytest.mark.slow
@pytest.mark.parametrize("home", MAIN)
@pytest.mark.parametrize("name", REST)
def test_another_program_does_it_too(name: str, home: str, rest: list[Differences]) -> None:
    for differences in rest:
        assert differences[name, home] == []
