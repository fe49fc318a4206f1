"""Does the ZeRO-Infinity paper's table of memory come out of its formulas?

The table's setting is 16 GPUs a node, 32 sequences of 1024 tokens a node (2 each GPU), a checkpoint
every block.
"""

from __future__ import annotations

import pytest

from tiermem.forecast.rates import (
    PAPER_BATCH,
    PAPER_GPUS,
    PAPER_MODELS,
    PAPER_SEQ,
    Transformer,
)

TIB, GIB = 1 << 40, 1 << 30
BATCH, GPUS, SEQ = PAPER_BATCH, PAPER_GPUS, PAPER_SEQ

# trillions of parameters; the model; TB of states; TB of all activations and of checkpoints a node;
# GB of working memory a GPU: states, activations. The working memory of the states of the first row
# follows from the formula.
TABLE = [
    (0.10, PAPER_MODELS[0], 1.83, 2.03, 0.05, 1.56, 1.63),
    (0.50, PAPER_MODELS[1], 9.16, 3.91, 0.12, 6.25, 2.50),
    (1.01, PAPER_MODELS[2], 18.31, 7.13, 0.20, 9.77, 3.56),
    (10.05, PAPER_MODELS[3], 182.81, 24.38, 0.76, 64.00, 8.00),
    (101.47, PAPER_MODELS[4], 1845.70, 88.59, 3.08, 400.00, 18.00),
]


@pytest.mark.parametrize(
    ("trillions", "model", "states", "activations", "checkpoints", "mswm", "awm"), TABLE
)
def test_memory_of_0_1_to_100_trillion_parameters(
    trillions: float,
    model: Transformer,
    states: float,
    activations: float,
    checkpoints: float,
    mswm: float,
    awm: float,
) -> None:
    half_a_digit = 0.0051
    assert model.num_params / 1e12 == pytest.approx(trillions, abs=half_a_digit)
    assert model.state_bytes / TIB == pytest.approx(states, abs=half_a_digit)
    assert model.activation_bytes(BATCH, SEQ) / TIB == pytest.approx(activations, abs=half_a_digit)
    assert model.checkpoint_bytes(BATCH, SEQ) / TIB == pytest.approx(checkpoints, abs=half_a_digit)
    assert model.state_working_bytes / GIB == pytest.approx(mswm, abs=half_a_digit)
    assert model.activation_working_bytes(BATCH // GPUS, SEQ) / GIB == pytest.approx(
        awm, abs=half_a_digit
    )
