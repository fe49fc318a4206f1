"""Are gradients reduced in the dtype that the config asks for? Two ranks, one launch."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import asked, launch

HERE = Path(__file__).parent
RANKS = 2
Found = list[dict[str, dict[str, list[str]]]]


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    words = [f"{case}, stage {stage}" for case, stage in asked(request, "case", "stage")]
    return launch(HERE / "reduce_on_ranks.py", RANKS, tmp_path_factory.mktemp("out"), *words)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("case", "linear", "norm"),
    [
        ("nothing asked", "float32", "float32"),
        ("communication fp16", "float16", "float16"),
        ("communication bf16", "bfloat16", "bfloat16"),
        ("autocast", "bfloat16", "float32"),
        ("autocast, safe norms", "float32", "bfloat16"),
        ("autocast, communication fp32", "float32", "float32"),
        ("autocast, fp32_allreduce", "float32", "float32"),
    ],
)
def test_gradients_add_up_in_what_is_asked(
    case: str, linear: str, norm: str, stage: int, launched: Found
) -> None:
    for rank in range(RANKS):
        found = launched[rank][f"{case}, stage {stage}"]
        for name, dtypes in found.items():
            if "layers" in name:
                expected = norm if ".norm." in name else linear
                assert expected in dtypes, (name, dtypes)
                if name.endswith(("up.weight", "norm.weight")):  # large enough to tell dtypes apart
                    assert dtypes == [expected], name
