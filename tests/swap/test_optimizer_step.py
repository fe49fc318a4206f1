"""Does one optimizer step from Python match float64 arithmetic, its format's rounding, and torch's
own optimizers?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from drawn import drawn
from hypothesis import given, settings

from tiermem.swap.base.native import Workers, choose_isa, narrow_part, optimizer_step, widen_part
from tiermem.swap.base.parts import (
    MOMENTS,
    Dither,
    Moment,
    Quantised,
    StepParts,
    StepRule,
    num_scales,
)

ADAMW = StepRule(
    "adamw",
    step_size=0.02,
    decay=0.997,
    grad_scale=0.5,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    inv_sqrt_bias2=3.1,
)
LOW = (torch.bfloat16, torch.float16)
MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.uint8: 3}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


def moment_like(
    values: torch.Tensor, dtype: torch.dtype, workers: Workers, is_positive: bool = False
) -> Moment:
    """`values` kept as a moment of that dtype, uint8 for 8-bit codes."""
    if dtype is not torch.uint8:
        return values.to(dtype)
    numel = values.numel()
    moment = Quantised(
        torch.empty(numel, dtype=torch.uint8), torch.empty(num_scales(numel), dtype=torch.uint8)
    )
    narrow_part(workers, values, moment, is_positive=is_positive)
    return moment


def ulps(seen: torch.Tensor, wanted: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Distance in units of the fp32 last place of `at`; all in float64."""
    _, exponent = torch.frexp(at.clamp(min=2.0**-126))
    return (seen.double() - wanted).abs() / torch.ldexp(torch.ones_like(at), exponent - 24)


def adamw_in_doubles(
    rule: StepRule, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor
) -> list[torch.Tensor]:
    """The formula on doubles, from scalars rounded to fp32 as the kernel rounds them."""
    c = {
        name: torch.tensor(getattr(rule, name), dtype=torch.float32).double()
        for name in rule._fields[1:8]
    }
    rest1, rest2 = (
        torch.tensor(1 - beta, dtype=torch.float32).double() for beta in (rule.beta1, rule.beta2)
    )
    g = g.double() * c["grad_scale"]
    m = m.double() + (g - m.double()) * rest1
    v = v.double() * c["beta2"] + g * g * rest2
    move = c["step_size"] * (m / (v.sqrt() * c["inv_sqrt_bias2"] + c["eps"]))
    return [p.double() * c["decay"] - move, m, v]


# ---- fp32 against doubles ------------------------------------------------------------------------


@given(
    numel=st.integers(0, 3000),
    offset=st.integers(0, 17),
    seed=st.integers(0, 2**31),
    shift=st.integers(-30, 20),
)
@settings(max_examples=drawn(80))
def test_fp32_rows_are_within_two_units_of_doubles(
    numel: int, offset: int, seed: int, shift: int
) -> None:
    workers = Workers(1)
    generator = torch.Generator().manual_seed(seed)
    p, m, g = (torch.randn(numel + offset, generator=generator)[offset:] for _ in range(3))
    v = torch.rand(numel + offset, generator=generator)[offset:] * 2.0 ** (2 * shift)
    m, g = m * 2.0**shift, g * 2.0**shift
    wanted = adamw_in_doubles(ADAMW, p, m, v, g)
    # A sum's rounding is relative to its terms: where they cancel, the result's own last place says
    # nothing.
    m_terms = m.abs().double() + g.abs().double()
    move_terms = 0.02 * m_terms / (wanted[2].sqrt() * 3.1 + 1e-8)
    terms = [p.abs().double() + 2 * move_terms, m_terms, wanted[2]]
    optimizer_step(workers, ADAMW, StepParts(None, p, g, (m, v)))
    for seen, value, at in zip((p, m, v), wanted, terms, strict=True):
        assert (ulps(seen, value, at) <= 2).all()
    workers.close()


@given(data=st.data(), rule=st.sampled_from(sorted(MOMENTS)))
@settings(max_examples=drawn(60))
def test_special_values_neither_spread_nor_vanish(data: st.DataObject, rule: str) -> None:
    special = st.sampled_from(
        [0.0, -0.0, 1e-45, -1e-40, 1.17e-38, math.inf, -math.inf, math.nan, 3.4e38, 1.0]
    )
    grads = data.draw(st.lists(special, min_size=1, max_size=150))
    workers = Workers(1)
    g = torch.tensor(grads)
    p = torch.ones_like(g)
    moments = tuple(torch.zeros_like(g) for kind in MOMENTS[rule] if not kind.is_optional)
    optimizer_step(workers, ADAMW._replace(name=rule, initial=0.0), StepParts(None, p, g, moments))
    for one, seen in zip(grads, p.tolist(), strict=True):
        alone, g_alone = torch.ones(1), torch.tensor([one])
        zeros = tuple(torch.zeros(1) for _ in moments)
        optimizer_step(workers, ADAMW._replace(name=rule), StepParts(None, alone, g_alone, zeros))
        assert alone.item() == seen or (math.isnan(seen) and math.isnan(alone.item()))
        assert not math.isnan(one) or math.isnan(seen)
    workers.close()


# ---- low precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("is_stochastic", [False, True])
def test_low_moments_are_the_fp32_row_rounded(
    dtype: torch.dtype, is_stochastic: bool, workers: Workers
) -> None:
    numel = 65536 + 777
    p, m, g = (torch.randn(numel) for _ in range(3))
    v = torch.rand(numel)
    low = [moment_like(m, dtype, workers), moment_like(v, dtype, workers, True)]
    m, v = (widen_part(workers, part, is_positive=bool(k)) for k, part in enumerate(low))
    p_low = p.clone()
    dither = Dither(key=5, step=9, first_element=1000) if is_stochastic else None
    optimizer_step(workers, ADAMW, StepParts(None, p, g, (m, v)))
    optimizer_step(workers, ADAMW, StepParts(None, p_low, g, low), dither)
    assert torch.equal(p, p_low)  # what is rounded is not used again in the same step
    for k, exact in enumerate((m, v)):
        seen = widen_part(workers, low[k], is_positive=bool(k))
        units = torch.ldexp(torch.ones(numel), torch.frexp(exact)[1] - 1 - MANTISSA[dtype])
        least = 2.0**-24 if dtype is torch.float16 else 0.0
        if isinstance(low[k], Quantised):  # denormals of the block's scale
            scales = low[k].scales.int() - 127  # type: ignore[union-attr]
            least = torch.ldexp(
                torch.ones(numel), scales.repeat_interleave(64)[:numel] - (31 if k else 17)
            )
        units = torch.maximum(units, torch.as_tensor(least))
        assert ((seen - exact).abs() <= units * (1.0 if is_stochastic else 0.5)).all()


@pytest.mark.parametrize("dtype", LOW)
def test_low_weight_beside_a_master_is_torchs_rounding(
    dtype: torch.dtype, workers: Workers
) -> None:
    p, m, g, v = (torch.rand(5000) for _ in range(4))
    weight = torch.empty(5000, dtype=dtype)
    for dither in (None, Dither(1, 2, 3)):  # a copy is no state: it is always rounded to nearest
        optimizer_step(workers, ADAMW, StepParts(weight, p, g, (m, v)), dither)
        assert torch.equal(weight, p.to(dtype))


def test_split_reproduces_the_fp32_trajectory_to_the_bit_over_a_thousand_steps(
    workers: Workers,
) -> None:
    numel = 1024 + 7
    weight = torch.randn(numel).bfloat16()
    weight[:2] = torch.tensor([1.0, -1.0])
    master = weight.float()
    low = torch.zeros(numel, dtype=torch.int16)
    full = (torch.zeros(numel), torch.zeros(numel))
    split = (torch.zeros(numel), torch.zeros(numel))
    num_ties = 0
    for step in range(1, 1001):
        g = torch.randn(numel, generator=torch.Generator().manual_seed(step)).bfloat16()
        rule = ADAMW._replace(
            step_size=1e-3 / (1 - 0.9**step), inv_sqrt_bias2=(1 - 0.95**step) ** -0.5
        )
        is_first = step == 1
        optimizer_step(workers, rule, StepParts(None, master, g, full), start_moments=is_first)
        parts = StepParts(weight, low, g, split)
        optimizer_step(workers, rule, parts, start_moments=is_first)
        num_ties += int((low == -(2**15)).sum())
        rounded = (
            ((master.view(torch.int32).long() + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        )
        assert torch.equal(rounded, weight)
    assert torch.equal(widen_part(workers, low, weight).view(torch.int32), master.view(torch.int32))
    assert torch.equal(full[0], split[0]) and torch.equal(full[1], split[1])
    assert num_ties > 0  # the patterns that nearest-even could not give back were among them


@pytest.mark.parametrize("dtype", LOW)
def test_a_stochastic_master_moves_as_far_as_an_exact_one(
    dtype: torch.dtype, workers: Workers
) -> None:
    """The mean over N elements of the rounded sum of 100 updates, each far below a unit: 5 standard
    deviations."""
    numel, num_steps = 20_000, 100
    unit = 2.0 ** -MANTISSA[dtype]
    rule = StepRule("sgd", step_size=unit / 50, decay=0.0)
    weight, stuck = torch.full((numel,), 1.5, dtype=dtype), torch.full((numel,), 1.5, dtype=dtype)
    for step in range(num_steps):
        optimizer_step(
            workers, rule, StepParts(weight, None, torch.full((numel,), -1.0)), Dither(3, step, 0)
        )
        optimizer_step(workers, rule, StepParts(stuck, None, torch.full((numel,), -1.0)))
    assert torch.equal(stuck, torch.full_like(stuck, 1.5))  # to nearest nothing ever moves
    moved = (weight.double() - 1.5) / unit
    # Independent roundings would leave a deviation of sqrt(100 * 0.02 * 0.98) = 1.4 units in each
    # element.
    assert abs(moved.mean().item() - num_steps / 50) < 5 * 1.4 / numel**0.5
    assert moved.std().item() < 1.0


def test_rounding_depends_on_key_step_and_element_alone(workers: Workers) -> None:
    def run(dither: Dither, cut: int, num_threads: int) -> torch.Tensor:
        own = Workers(num_threads)
        weight = torch.full((4096,), 1.001).bfloat16()
        rule = StepRule("sgd", step_size=1e-4, decay=0.0)
        for begin, end in ((0, cut), (cut, 4096)):
            part = dither._replace(first_element=dither.first_element + begin)
            optimizer_step(
                own, rule, StepParts(weight[begin:end], None, torch.ones(end - begin)), part
            )
        own.close()
        return weight

    wanted = run(Dither(1, 1, 10), 4096, 1)
    assert torch.equal(run(Dither(1, 1, 10), 1001, 3), wanted)
    assert torch.equal(run(Dither(1, 1, 0), 4096, 1)[10:], wanted[:-10])
    for other in (Dither(2, 1, 10), Dither(1, 2, 10), Dither(1, 1, 11)):
        assert not torch.equal(run(other, 4096, 1), wanted)


# ---- torch's optimizers --------------------------------------------------------------------------


def torch_rule(name: str, step: int, options: dict[str, float | bool]) -> StepRule:
    """What torch.optim's options mean in step number `step`."""
    lr, decay = 0.05, float(options.get("weight_decay", 0.0))
    rule = StepRule(
        name,
        lr,
        decay,
        maximize=bool(options.get("maximize")),
        nesterov=bool(options.get("nesterov")),
    )
    if name in ("adam", "adamw"):
        scale = 1 / (1 - 0.9**step)
        rule = rule._replace(
            step_size=lr * scale,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            inv_sqrt_bias2=(1 - 0.999**step) ** -0.5,
        )
    if name == "adamw":
        rule = rule._replace(decay=1 - lr * decay)
    if name == "adagrad":
        initial = float(options.get("initial_accumulator_value", 0.0))
        slower = 1 + (step - 1) * float(options.get("lr_decay", 0.0))
        rule = rule._replace(step_size=lr / slower, eps=1e-10, initial=initial)
    if name == "sgd":
        rule = rule._replace(
            momentum=float(options.get("momentum", 0.0)),
            dampening=float(options.get("dampening", 0.0)),
        )
    return rule


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"weight_decay": 0.1}),
        ("adamw", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
        ("adam", {"weight_decay": 0.1}),
        ("adam", {"amsgrad": True}),
        ("adagrad", {"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
        ("adagrad", {"maximize": True}),
        ("sgd", {"weight_decay": 0.1}),
        ("sgd", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
        ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ],
)
def test_rules_follow_torch(name: str, options: dict[str, float | bool], workers: Workers) -> None:
    kind = {"adamw": "AdamW", "adam": "Adam", "adagrad": "Adagrad", "sgd": "SGD"}[name]
    numel = 3001
    theirs = torch.nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    ours = theirs.detach().clone()
    optim = getattr(torch.optim, kind)([theirs], lr=0.05, foreach=False, **options)
    num_moments = {"adagrad": 1, "sgd": int("momentum" in options)}.get(
        name, 3 if options.get("amsgrad") else 2
    )
    moments = tuple(torch.full((numel,), math.nan) for _ in range(num_moments))
    for step in range(1, 21):
        g = torch.randn(numel, generator=torch.Generator().manual_seed(step)) * (step % 3 + 0.1)
        theirs.grad = g.clone()
        optim.step()
        rule = torch_rule(name, step, options)
        optimizer_step(workers, rule, StepParts(None, ours, g, moments), start_moments=step == 1)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6 * step, atol=2e-7 * step)


def test_lion_is_chen_and_others_formula(workers: Workers) -> None:
    p, m = torch.randn(3001), torch.zeros(3001)
    q, n = p.double(), m.double()
    rule = StepRule("lion", step_size=0.01, decay=1 - 0.01 * 0.1, beta1=0.9, beta2=0.99)
    for step in range(20):
        g = torch.randn(3001, generator=torch.Generator().manual_seed(step))
        g[:5] = 0
        optimizer_step(workers, rule, StepParts(None, p, g, (m,)), start_moments=step == 0)
        q = q * (1 - 0.01 * 0.1) - 0.01 * (0.9 * n + 0.1 * g).sign()
        n = 0.99 * n + 0.01 * g
    torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(m.double(), n, rtol=1e-5, atol=1e-6)


# ---- beside what it replaces ---------------------------------------------------------------------


def copied(parts: StepParts) -> StepParts:
    """Equal tensors elsewhere."""
    moments = [
        Quantised(*map(torch.clone, m)) if isinstance(m, Quantised) else m.clone()
        for m in parts.moments
    ]
    weight, master = (None if part is None else part.clone() for part in parts[:2])
    return StepParts(weight, master, parts.grad, moments)


def spoiled(parts: StepParts) -> StepParts:
    for part in (parts.weight, parts.master, *parts.moments):
        for each in part if isinstance(part, Quantised) else [part]:
            if each is not None:
                each.view(torch.uint8).fill_(0xA5)  # type: ignore[union-attr]
    return parts


@pytest.mark.parametrize("rule", ["adamw", "lion", "adagrad"])
@pytest.mark.parametrize("states", ["fp32", "split", "bf16", "8bit"])
@pytest.mark.parametrize("numel", [1, 64 * 777 + 5, 2**17 + 2**14 + 192])
def test_a_step_beside_what_it_replaces_writes_the_bits_of_one_in_place(
    rule: str, states: str, numel: int, workers: Workers
) -> None:
    torch.manual_seed(numel)
    weight = torch.randn(numel).to(torch.float32 if states == "fp32" else torch.bfloat16)
    master = (
        torch.randint(-9, 9, (numel,), dtype=torch.int16) if states in ("split", "8bit") else None
    )
    kind = {"fp32": torch.float32, "8bit": torch.uint8}.get(states, torch.bfloat16)
    kinds = [each for each in MOMENTS[rule] if not each.is_optional]
    moments = [moment_like(torch.rand(numel), kind, workers, each.is_positive) for each in kinds]
    source = StepParts(weight, master, torch.randn(numel), moments)
    before, expected = copied(source), copied(source)
    beside = spoiled(copied(source))._replace(source=source)
    for each in (expected, beside):
        optimizer_step(workers, ADAMW._replace(name=rule), each, Dither(1, 2, 3))
    assert_same_parts(beside, expected)
    assert_same_parts(source, before)


def assert_same_parts(one: StepParts, other: StepParts) -> None:
    for mine, theirs in zip(
        (one.weight, one.master, *one.moments),
        (other.weight, other.master, *other.moments),
        strict=True,
    ):
        for a, b in (
            zip(mine, theirs, strict=True) if isinstance(mine, Quantised) else [(mine, theirs)]
        ):  # type: ignore[arg-type]
            assert (a is b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_parts_that_are_their_own_source_are_stepped_in_place(workers: Workers) -> None:
    """As weights in memory are stepped beside states in a buffer."""
    source = parts()
    expected, beside = copied(source), source._replace(weight=torch.full((100,), 7.0).bfloat16())
    optimizer_step(workers, ADAMW, expected)
    optimizer_step(workers, ADAMW, beside._replace(source=source))
    assert_same_parts(beside, expected)


# ---- what is refused -----------------------------------------------------------------------------


def parts(**changes: object) -> StepParts:
    numel = 100
    q8 = Quantised(torch.zeros(numel, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8))
    low = torch.zeros(numel, dtype=torch.int16)
    given = StepParts(torch.zeros(numel).bfloat16(), low, torch.zeros(numel), (q8, q8))
    return given._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "rule", "message"),
    [
        (parts(), ADAMW._replace(name="adamax"), "'adamax'; allowed are adamw"),
        (parts(grad=torch.zeros(99)), ADAMW, "weight has 100 elements where 99"),
        (parts(grad=torch.zeros(100).double()), ADAMW, "grad is torch.float64; allowed"),
        (parts(grad=torch.zeros(200)[::2]), ADAMW, "flat contiguous"),
        (parts(grad=torch.zeros(100, 1)), ADAMW, "flat contiguous"),
        (
            parts(weight=torch.zeros(100)),
            ADAMW,
            "beside a bf16 weight; the weight given is torch.float32",
        ),
        (parts(weight=None), ADAMW, "the weight given is none"),
        (parts(weight=None, master=None), ADAMW, "neither weight nor master"),
        (
            parts(master=torch.zeros(100).bfloat16()),
            ADAMW,
            "master is torch.bfloat16; allowed are torch.float32",
        ),
        (
            parts(moments=()),
            ADAMW,
            "0 moments given for adamw, which keeps m, v, largest v .optional.",
        ),
        (parts(), ADAMW._replace(name="lion"), "2 moments given for lion"),
        (
            parts(moments=()),
            StepRule("sgd", 1.0, 0.0, nesterov=True),
            "nesterov needs sgd with a momentum",
        ),
        (
            parts(
                moments=(
                    Quantised(
                        torch.zeros(100, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
                    ),
                )
            ),
            StepRule("sgd", 1.0, 0.0),
            "scales has 1 elements where 2",
        ),
        (parts(source=parts(moments=(torch.zeros(100),) * 2)), ADAMW, "a source has the dtypes"),
    ],
)
def test_what_does_not_fit_is_refused(
    given: StepParts, rule: StepRule, message: str, workers: Workers
) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_step(workers, rule, given)


def test_nothing_to_step_is_no_error(workers: Workers) -> None:
    empty = torch.empty(0)
    optimizer_step(workers, ADAMW, StepParts(None, empty, empty, (empty, empty)))
    assert widen_part(workers, empty.bfloat16()).numel() == 0


def test_every_instruction_set_gives_the_same_bits(workers: Workers) -> None:
    seen = []
    for isa in (0, 1, 2):
        try:
            choose_isa(isa)
        except OSError:
            continue
        torch.manual_seed(0)
        weight = torch.randn(5000).bfloat16()
        low = torch.zeros(5000, dtype=torch.uint16)
        moments = [moment_like(torch.rand(5000), torch.uint8, workers, bool(k)) for k in (0, 1)]
        optimizer_step(
            workers,
            ADAMW,
            StepParts(weight, low, torch.randn(5000).bfloat16(), moments),
            Dither(1, 2, 3),
        )
        seen.append(
            [weight.view(torch.int16), low.view(torch.int16), *(t for q in moments for t in q)]
        )
    choose_isa()
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], others, strict=True))
