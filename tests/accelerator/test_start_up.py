"""Is the device there for a process that a user starts, and gone for one that does not want it?"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from on_simulated import python

from accelerator import build
from accelerator.fixture import WHY_SKIPPED

needs_simulator = pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))


TOUCHES = [  # as with CUDA, free bytes and the current stream are questions to a context
    "torch.ones(1, device='sim')",
    "torch.Stream('sim')",
    "torch.ones(1).pin_memory()",
    "torch.sim.host_register(a.data_ptr(), 64)",
    "torch.accelerator.get_memory_info()",
    "torch.accelerator.current_stream()",
]
SCRIPT = f"""
import os, sys
import torch

sys.path.append({str(Path(__file__).parents[1])!r})
assert torch.accelerator.is_available() and str(torch.accelerator.current_accelerator()) == "sim"
assert torch.accelerator.device_count() == 3 and torch.accelerator.memory_allocated() == 0
torch.manual_seed(0)
a = torch.randn(4, 4, requires_grad=True)
total = (a @ a).sum()
for touch in {TOUCHES}:
    pid = os.fork()
    if pid == 0:
        eval(touch)
        os._exit(0 if torch.sim.was_touched() and torch.sim._initialized else 1)
    assert os.waitpid(pid, 0)[1] == 0, touch
total.backward()
assert not torch.sim.was_touched() and not torch.sim._initialized

x = torch.nn.Linear(3, 3).to("sim")(torch.ones(1, 3, device="sim"))
assert torch.sim.pending() > 0 and torch.accelerator.get_memory_info()[1] == 1 << 20
x.sum().backward()
assert torch.sim.was_touched() and x.sim("sim:2").device.index == 2 and x.is_sim

from programs.unsharded import Program, assert_same, train
for num_threads in (1, 2):  # those of autograd are running
    torch.set_num_threads(num_threads)
    assert_same(train(Program(num_steps=2), "sim"), train(Program(num_steps=2), "cpu"))
"""


@pytest.mark.slow
@needs_simulator
def test_import_torch_loads_the_device_and_cpu_work_makes_no_context() -> None:
    python(
        "-c",
        SCRIPT,
        TIERMEM_SIM_DEVICES="3",
        TIERMEM_SIM_SCHEDULE="late",
        TIERMEM_SIM_CAPACITY=str(1 << 20),
    )


@needs_simulator
def test_a_machine_without_devices() -> None:
    python(
        "-c", "import torch; assert not torch.accelerator.is_available()", TIERMEM_SIM_DEVICES="0"
    )


@needs_simulator
def test_without_the_fixture_no_device_is_plugged_in() -> None:
    assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0


def test_what_one_test_set_does_not_reach_the_next(sim: ModuleType) -> None:
    sim.set_schedule("late")
    sim.set_capacity(1 << 20)
    # an error, pending
    torch.nn.functional.embedding(torch.tensor([9], device="sim"), torch.ones(3, 2, device="sim"))
    sim.set_device(1)
    sim.reset()
    assert sim.pending() == 0 and sim.mem_get_info()[1] == 16 << 30 and sim.current_device() == 0


def test_a_schedule_that_does_not_exist(sim: ModuleType) -> None:
    for wrong in ("later", "random:x"):
        with pytest.raises(
            ValueError, match="at_once, late, main_first, side_first, threads or random:SEED"
        ):
            sim.set_schedule(wrong)


def test_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in str(build.missing_for_build())
    with pytest.raises(build.NoCompilerError):
        build.built()
