"""Do the ZeRO-Infinity paper's table of memory and its claims on bandwidth come out of its formulas?

The table's setting is 16 GPUs a node, 32 sequences of 1024 tokens a node (2 each GPU), a checkpoint every block.
"""

from __future__ import annotations

import pytest

from tiermem.forecast.rates import (
    PAPER_BATCH,
    PAPER_GPUS,
    PAPER_MODELS,
    PAPER_SEQ,
    Transformer,
    activation_intensity,
    bandwidth_for,
    efficiency,
    optimizer_intensity,
    weight_intensity,
)

TIB, GIB = 1 << 40, 1 << 30
BATCH, GPUS, SEQ = PAPER_BATCH, PAPER_GPUS, PAPER_SEQ
PEAK = 70e12  # what the paper takes a V100 to reach

# trillions of parameters; the model; TB of states; TB of all activations and of checkpoints a node;
# GB of working memory a GPU: states, activations. The working memory of the states of the first row follows from the formula.
TABLE = [
    (0.10, PAPER_MODELS[0], 1.83, 2.03, 0.05, 1.56, 1.63),
    (0.50, PAPER_MODELS[1], 9.16, 3.91, 0.12, 6.25, 2.50),
    (1.01, PAPER_MODELS[2], 18.31, 7.13, 0.20, 9.77, 3.56),
    (10.05, PAPER_MODELS[3], 182.81, 24.38, 0.76, 64.00, 8.00),
    (101.47, PAPER_MODELS[4], 1845.70, 88.59, 3.08, 400.00, 18.00),
]


@pytest.mark.parametrize(("trillions", "model", "states", "activations", "checkpoints", "mswm", "awm"), TABLE)
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
    assert model.activation_working_bytes(BATCH // GPUS, SEQ) / GIB == pytest.approx(awm, abs=half_a_digit)


def test_a_checkpoint_every_second_block_halves_them_and_doubles_what_is_recomputed() -> None:
    every, second = Transformer(100, 2048, 16), Transformer(100, 2048, 16, checkpoint_interval=2)
    assert second.checkpoint_bytes(3, 77) * 2 == every.checkpoint_bytes(3, 77)
    assert second.activation_working_bytes(3, 77) == 2 * every.activation_working_bytes(3, 77)
    assert second.activation_bytes(3, 77) == every.activation_bytes(3, 77)


def test_intensity_is_operations_over_bytes_moved() -> None:
    model, batch, seq = Transformer(24, 1024, 16), 3, 640
    work = model.operations(batch, seq)
    assert weight_intensity(batch, seq) == work / (
        4 * 2 * model.num_params
    )  # three loads and the gradients, 16 bits each
    assert optimizer_intensity(batch, seq) == work / (2 * 16 * model.num_params)
    assert activation_intensity(model.hidden) == work / (2 * model.checkpoint_bytes(batch, seq))


def test_70_gb_s_of_weights_suffice_for_half_the_peak_at_batch_1() -> None:
    assert efficiency(weight_intensity(1, 1024), 70e9, PEAK) == pytest.approx(0.506, abs=0.001)
    assert efficiency(weight_intensity(1, 1024), 60e9, PEAK) < 0.5


def test_optimizer_states_need_1_5_tb_s_for_nine_tenths_at_batch_2() -> None:
    assert efficiency(optimizer_intensity(2, 1024), 1.5e12, PEAK) > 0.9
    assert bandwidth_for(optimizer_intensity(2, 1024), 0.9, PEAK) == pytest.approx(1.23e12, rel=0.01)
    quarter = bandwidth_for(weight_intensity(2, 1024), 0.5, PEAK) / bandwidth_for(
        optimizer_intensity(2, 1024), 0.5, PEAK
    )
    assert quarter == 1 / 4


def test_activations_need_2_gb_s_at_2k_and_less_than_1_from_8k_on() -> None:
    assert efficiency(activation_intensity(2048), 2e9, PEAK) > 0.5
    assert efficiency(activation_intensity(8192), 1e9, PEAK) > 0.5
    assert efficiency(activation_intensity(2048), 1e9, PEAK) < 0.5


def test_bandwidth_is_the_inverse_of_efficiency() -> None:
    for wanted in (0.1, 0.5, 0.93):
        assert efficiency(512.0, bandwidth_for(512.0, wanted, PEAK), PEAK) == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"the efficiency is 1\.0; it must lie between 0 and 1"):
        bandwidth_for(512.0, 1.0, PEAK)
