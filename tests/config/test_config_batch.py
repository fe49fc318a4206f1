"""Do the batch sizes that are given determine the rest, and is a wrong product refused with the
arithmetic?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.config import BatchSizes, ConfigError, load_config, solve_batch

SIZES = st.integers(1, 64)


@given(micro=SIZES, accumulation=SIZES, ranks=SIZES, left_out=st.integers(0, 2))
def test_any_two_sizes_determine_the_third(
    micro: int, accumulation: int, ranks: int, left_out: int
) -> None:
    sizes = [micro * accumulation * ranks, micro, accumulation]
    known = [None if i == left_out else size for i, size in enumerate(sizes)]
    assert solve_batch(known[0], known[1], known[2], ranks) == BatchSizes(
        micro, accumulation, sizes[0]
    )


@given(
    total=st.none() | SIZES, micro=st.none() | SIZES, accumulation=st.none() | SIZES, ranks=SIZES
)
def test_solution_multiplies_out_and_keeps_what_was_given(
    total: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    try:
        sizes = solve_batch(total, micro, accumulation, ranks)
    except ValueError:
        return
    assert sizes.total == sizes.micro * sizes.accumulation * ranks
    assert (total or sizes.total, micro or sizes.micro, accumulation or sizes.accumulation) == (
        sizes.total,
        sizes.micro,
        sizes.accumulation,
    )


def test_total_alone_accumulates_nothing() -> None:
    assert load_config({"train_batch_size": 16}).batch(num_ranks=4) == BatchSizes(4, 1, 16)


def test_micro_batch_alone_accumulates_nothing() -> None:
    assert load_config({"train_micro_batch_size_per_gpu": 3}).batch(num_ranks=4) == BatchSizes(
        3, 1, 12
    )


def test_wrong_product_shows_the_arithmetic() -> None:
    config = load_config(
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
        }
    )
    with pytest.raises(
        ConfigError, match=r"train_batch_size 32 is not .* 2 \* .* 3 \* ranks 4 = 24"
    ):
        config.batch(num_ranks=4)


@pytest.mark.parametrize("other", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_total_that_does_not_divide_shows_the_nearest(other: str) -> None:
    config = load_config({"train_batch_size": 10, other: 2})
    with pytest.raises(
        ConfigError,
        match=rf"10 is not a multiple of {other} 2 \* ranks 2 = 4; the nearest that is: 8",
    ):
        config.batch(num_ranks=2)


@pytest.mark.parametrize("config", [{}, {"gradient_accumulation_steps": 2}])
def test_neither_total_nor_micro_batch_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="neither train_batch_size nor"):
        load_config(config).batch(num_ranks=1)


def test_accumulation_that_follows_is_refused_with_step_in_backward() -> None:
    config = load_config(
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0,
            "tiermem": {"step_in_backward": True},
        }
    )
    assert config.batch(num_ranks=4).accumulation == 1
    with pytest.raises(ConfigError, match="gradient_accumulation_steps 4"):
        config.batch(num_ranks=1)
