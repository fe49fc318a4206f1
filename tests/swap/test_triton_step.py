"""Is the Triton kernel the step that the others are? Its bits in the interpreter, its instructions
for GPUs that are not here.

A kernel is compiled for a GPU without one: the driver that Triton asks for its target is replaced.
Rounding is pinned where the name of every fp32 operation in the code says that it rounds to
nearest: an assembler may not fuse those.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_torch_step import (
    BF16,
    F16,
    F32,
    MASTERS,
    MOMENT_DTYPES,
    Q8,
    RULES,
    SPLIT,
    copy_of,
    is_same,
    parts_of,
    tensors_of,
)

from tiermem.swap.base.native import Workers
from tiermem.swap.base.parts import Dither, StepParts
from tiermem.swap.kernels.device_kernels import DeviceKernels, kernels_of
from tiermem.swap.kernels.torch_step import step_in_torch

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.backends.compiler")
triton_step = pytest.importorskip("tiermem.swap.kernels.triton_step")
triton_sums = pytest.importorskip("tiermem.swap.kernels.triton_sums")

Compile = Callable[..., list[Any]]
SEVERAL = {"cuda 80": ("cuda", 80, 32), "cuda 90": ("cuda", 90, 32), "cuda 120": ("cuda", 120, 32)}


class NoDriver:
    """Of a device that is not there."""

    def __init__(self, *target: Any) -> None:
        self.target = compiler.GPUTarget(*target)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # each has a cache of its own

    def get_current_stream(self, device: str) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compile]:
    """compiled(target, *arguments of launch) compiles instead of starting, and returns the
    kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, found = triton_step._step, list[Any]()

    class Compiling:
        def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
            return lambda *args, **options: found.append(kernel.warmup(*args, grid=grid, **options))

    def compile_for(target: Sequence[Any], *args: Any, **flags: Any) -> list[Any]:
        found.clear()
        triton.runtime.driver.set_active(NoDriver(*target))
        triton_step.launch(*args, **flags)
        return list(found)

    monkeypatch.setattr(triton_step, "_step", Compiling())
    yield compile_for
    triton.runtime.driver.set_active(None)  # found when it is next asked for


def operations(ptx: str) -> list[str]:
    """The instructions of a kernel: names with all that they say of types and rounding."""
    lines = re.sub(r"//.*", "", ptx[ptx.index("{") :]).splitlines()
    return [
        found[1]
        for line in lines
        if (found := re.match(r"\s+(?:@!?%\w+\s+)?([a-z][\w.:]*)\s.*;", line))
    ]


# ---- bits ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_interpreter_gives_the_native_bits() -> None:
    file = Path(__file__).with_name("interpreted_triton_step.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1150,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, (
        done.stdout[-5000:] + done.stderr[-1000:]
    )


# ---- instructions --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_operation_of_the_code_for_cuda_is_rounded_by_itself(
    name: str, workers: Workers, compiled: Compile
) -> None:
    rule, num_moments = RULES[name]
    kinds = itertools.cycle(MOMENT_DTYPES[:1] + MOMENT_DTYPES[3:])
    for k, (weight, master) in enumerate(MASTERS[k] for k in (0, 2, 3, 4, 5)):
        kind, grad = next(kinds)[:num_moments], (BF16, F16, F32)[k % 3]
        for numel, start, dither in ((4096, False, Dither(1, 2, 3)), (451, True, None)):
            parts = parts_of(rule, workers, numel, weight, master, kind, grad)
            [kernel] = compiled(SEVERAL["cuda 90"], rule, parts, dither, start_moments=start)
            check_rounding(kernel.asm["ptx"], "adam" in name, name == "adagrad")
            assert kernel.metadata.enable_fp_fusion is False  # ptxas gets --fmad=false


def check_rounding(ptx: str, is_adam: bool, is_adagrad: bool) -> None:
    found = operations(ptx)
    floats = {each for each in found if re.search(r"\.f(32|64|16)|\.bf16", each)}
    arithmetic = {
        each
        for each in floats
        if each.split(".")[0] not in ("setp", "selp", "mov", "ld", "st", "cvt", "copysign")
    }
    allowed = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32"}
    allowed |= {"div.rn.f32", "sqrt.rn.f32"} if is_adam or is_adagrad else set()
    assert {"add.rn.f32", "mul.rn.f32"} <= arithmetic <= allowed, arithmetic
    assert {"div.rn.f32", "sqrt.rn.f32"} <= arithmetic or not (is_adam or is_adagrad)
    exact = {
        "cvt.f32.f16",
        "cvt.rn.f16.f32",
        "cvt.rn.f16x2.f32",
        "cvt.rzi.s32.f32",
        "cvt.rn.f32.s32",
        "cvt.rn.f32.u32",
    }
    assert {each for each in floats if each.startswith("cvt")} <= exact, floats
    assert not [each for each in found if re.search(r"\bcall|ftz|approx|full|fma|mad\.r|sat", each)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", SEVERAL)
def test_each_byte_is_read_once_and_written_once(
    name: str, workers: Workers, compiled: Compile
) -> None:
    """Bytes of all threads of a program, for whole blocks: nothing is spilled, nothing is read
    again."""
    rule, num_moments = RULES["adamw amsgrad"]
    for (weight, master), moments, written, read in (
        ((None, F32), (F32, F32, F32), 16, 18),
        ((BF16, F32), (F32, F32, F32), 18, 18),
        ((BF16, SPLIT), (BF16, BF16, BF16), 10, 12),
        ((F16, None), (F16, BF16, F32), 10, 12),
    ):
        parts = parts_of(rule, workers, 4096, weight, master, moments[:num_moments], BF16)
        [kernel] = compiled(SEVERAL[name], rule, parts, Dither(1, 2, 3))
        moved = {"ld": 0, "st": 0}
        for each in operations(kernel.asm["ptx"]):
            if found := re.fullmatch(r"(ld|st)\.(global|local)(?:\.v(\d))?\.b(\d+)", each):
                moved[found[1]] += (
                    int(found[3] or 1) * int(found[4]) // 8 * kernel.metadata.num_warps * 32
                )
        elements = triton_step._ROWS.value * triton_step._BLOCK.value
        assert moved == {"ld": read * elements, "st": written * elements}


@pytest.mark.skipif(
    triton.__version__.startswith("3.6."),
    reason="Triton 3.6 writes ROCm's exact roots out, with fused products in them, so that its text proves nothing",
)
def test_the_code_for_rocm_has_no_fast_operation(workers: Workers, compiled: Compile) -> None:
    """Of LLVM's, from which the exact sequences follow: no flag allows less than IEEE 754, and
    subnormals are kept."""
    for name, (weight, master) in (
        ("adamw amsgrad", (BF16, SPLIT)),
        ("adagrad", (None, F32)),
        ("lion", (F16, None)),
    ):
        rule, num_moments = RULES[name]
        parts = parts_of(rule, workers, 4096, weight, master, [F32, Q8, BF16][:num_moments], BF16)
        [kernel] = compiled(("hip", "gfx942", 64), rule, parts, Dither(1, 2, 3))
        code = kernel.asm["llir"]
        assert re.search(r"= fmul (float|<)", code) and re.search(r"= fadd (float|<)", code)
        assert ("fdiv" in code and "llvm.sqrt" in code) or name == "lion"
        assert not re.search(
            r"\b(contract|fast|afn|arcp|reassoc|nsz|nnan)\b|fpmath|llvm\.fma|fmuladd|amdgcn\.(rcp|sqrt)",
            code,
        )
        assert '"denormal-fp-math-f32"="ieee"' in code


def test_other_scalars_and_random_words_need_no_other_kernel(
    workers: Workers, compiled: Compile
) -> None:
    rule, _ = RULES["adamw"]
    parts, found = parts_of(rule, workers, 4096, BF16, None, [BF16, Q8], BF16), set()
    for k, dither in enumerate(
        (Dither(1, 1, 0), Dither(1, 16, 1 << 20), Dither(5, 7, 64), Dither(9, 0, 1 << 33))
    ):
        [kernel] = compiled(
            SEVERAL["cuda 90"], rule._replace(eps=float(k), step_size=16.0 * k), parts, dither
        )
        found.add(id(kernel))
    assert len(found) == 1


# ---- who steps -----------------------------------------------------------------------------------


def test_the_kernel_steps_devices_of_cuda_and_rocm_only() -> None:
    assert kernels_of(torch.device("cuda", 0)) == (
        triton_step.step_in_triton,
        triton_sums.block_sums_in_triton,
    )
    assert kernels_of(torch.device("xpu", 0)) == kernels_of(torch.device("meta")) == DeviceKernels()


def test_what_triton_cannot_step_is_stepped_by_torch_operations(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    """Here there is no driver."""
    rule, _ = RULES["lion"]
    parts = parts_of(rule, workers, 500, BF16, SPLIT, [Q8])
    ours = copy_of(parts)
    for _ in range(2):
        triton_step.step_in_triton(rule, ours, Dither(1, 2, 3))
        step_in_torch(rule, parts, Dither(1, 2, 3))
    assert all(
        is_same(seen, wanted)
        for seen, wanted in zip(tensors_of(ours), tensors_of(parts), strict=True)
    )
    assert caplog.text.count("torch operations do, to the same bits") == 1


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="neither weight nor master"):
        triton_step.step_in_triton(RULES["sgd"][0], StepParts(None, None, torch.zeros(3)))
