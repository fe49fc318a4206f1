"""Does torch.compile, used as in plain PyTorch, train sharded models to the same bits, with as many
graphs?

Hooks stay outside of graphs (tiermem/weights/backward_marks.py). engine.compile() is asked in
tests/engine/test_engine_compile.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs.compiled import PROGRAMS, train_compiled
from programs.faces import Plain, Sharded, compare, run
from programs.homes import MAIN, policy_of


@pytest.fixture(scope="module", autouse=True)
def compiled_before() -> None:
    """torch starts a thread of tqdm's with its first compilation, and keeps it: no test is blamed
    for that."""
    torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")(torch.ones(1, 2))


@pytest.mark.slow
def test_compiled_blocks_share_one_graph_and_train_as_in_plain_pytorch(tmp_path: Path) -> None:
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    def program(face: Plain | Sharded) -> dict[str, Any]:
        return train_compiled(face, "by call", False, counting)

    expected = run(program, Plain())
    of_plain = list(graphs)
    graphs.clear()
    assert compare(run(program, Sharded(policy_of("nvme", tmp_path))), expected) == []
    # one for training, one without gradients: ten blocks share them, whole
    assert graphs == of_plain


@pytest.mark.slow
@pytest.mark.parametrize("home", MAIN)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_program_does_what_it_does_in_plain_pytorch(
    name: str, home: str, tmp_path: Path
) -> None:
    expected = run(PROGRAMS[name], Plain())
    assert compare(run(PROGRAMS[name], Sharded(policy_of(home, tmp_path))), expected) == []
