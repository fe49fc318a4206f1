"""From the precision switches of the reference, and from tiermem.precision, to one Precision; and what is refused on the way.

    bf16_master_     bf16_optimizer_  offload_
    weights_and_grads       _states   optimizer   the reference                          here
    false            false            any         fp32 master, fp32 moments: 12 bytes    the same
    true             false            cpu         bf16 master, fp32 moments: 10          the same (8 beside the weight)
    true             false            nvme        moments become bf16 after one step     bf16 master, fp32 moments, as asked
    true             false            none        refused                                refused
    true             true             any         all bf16: 6                            the same (4 beside the weight)
    false            true             any         refused                                refused
    true             any              stage 0     refused                                refused

fp16_master_weights_and_grads has the rows of bf16_optimizer_states false: refused in stage 0 and without offload, on cpu and
nvme an fp16 master with fp32 moments (fp16 ones with optimizer.params.fp32_optimizer_states false). The row without offload
is refused although the step runs on the CPU here: a config means the same in both systems. tiermem.precision asks for
that combination without offload.

The reference rounds to nearest, so parts that its switches lower are rounded so, unless tiermem.precision.rounding says
otherwise. A switch that is false asks for nothing: tiermem.precision may. One that is true and contradicts it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from tiermem.config.offload import OffloadDevice
from tiermem.config.optimizer import AdamParams, OptimizerConfig
from tiermem.config.own import OwnConfig
from tiermem.config.precision import Bf16Config, DataTypesConfig, Fp16Config
from tiermem.config.zero import ZeroConfig
from tiermem.precision import DTYPES, Precision

__all__ = ["Switches", "precision_of", "precision_problems"]

Problems = list[tuple[str, str]]

_BF16_MASTER = "bf16.bf16_master_weights_and_grads"
_BF16_STATES = "bf16.bf16_optimizer_states"
_FP16_MASTER = "fp16.fp16_master_weights_and_grads"
_FP32_STATES = "optimizer.params.fp32_optimizer_states"
_DEVICE = "zero_optimization.offload_optimizer.device"


class Switches(NamedTuple):
    """The sections that decide it together."""

    bf16: Bf16Config
    fp16: Fp16Config
    data_types: DataTypesConfig
    zero: ZeroConfig
    optimizer: OptimizerConfig | None
    own: OwnConfig
    seed: int

    @property
    def computed_in(self) -> Literal["bf16", "fp16", "fp32"]:
        """What the model computes in."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def fp32_states(self) -> bool | None:
        """optimizer.params.fp32_optimizer_states; None when it is not set."""
        params = self.optimizer.params if self.optimizer is not None else None
        is_set = isinstance(params, AdamParams) and params.is_set("fp32_optimizer_states")
        return params.fp32_optimizer_states if isinstance(params, AdamParams) and is_set else None


class _Ask(NamedTuple):
    """What a switch asks of a field of Precision."""

    field: str
    value: str
    key: str


def precision_of(switches: Switches) -> Precision:
    """What masters, moments and gradients are kept in. For switches without problems."""
    asks = list(_asks(switches))
    own = switches.own.precision.asked if switches.own.precision is not None else {}
    fields: dict[str, Any] = {"seed": switches.seed}
    if any(ask.field in ("master", "moments") and ask.value != "fp32" for ask in asks):
        fields["rounding"] = "nearest"
    fields |= {ask.field: ask.value for ask in asks}
    fields |= {name: value for name, value in own.items() if name != "grads" or value is not None}
    return Precision(**fields)


def precision_problems(switches: Switches) -> Problems:
    """What is wrong with the switches taken together: (key, sentence) each."""
    found = [*_bf16_problems(switches), *_fp16_problems(switches), *_param_dtype_problems(switches)]
    found += _contradicted(switches)
    return found or _unkept(switches)


def _asks(switches: Switches) -> Iterator[_Ask]:
    """What the reference's switches decide; true ones alone."""
    bf16, grads = switches.bf16, switches.data_types.grad_accum_dtype
    for is_on, name, key in (
        (bf16.bf16_master_weights_and_grads, "bf16", _BF16_MASTER),
        (switches.fp16.fp16_master_weights_and_grads, "fp16", _FP16_MASTER),
    ):
        if is_on:
            yield _Ask("master", name, key)
            if grads is None:
                yield _Ask("grads", name, key)
            if switches.fp32_states is False:
                yield _Ask("moments", name, _FP32_STATES)
    if bf16.bf16_optimizer_states:
        yield _Ask("moments", "bf16", _BF16_STATES)
    elif switches.fp32_states:
        yield _Ask("moments", "fp32", _FP32_STATES)
    if grads is not None:
        yield _Ask("grads", grads, "data_types.grad_accum_dtype")


def _bf16_problems(switches: Switches) -> Problems:
    master, states = switches.bf16.bf16_master_weights_and_grads, switches.bf16.bf16_optimizer_states
    found: Problems = []
    if states and not master:
        found.append(
            (
                _BF16_STATES,
                f"true with {_BF16_MASTER} false, but bf16 moments are kept beside a bf16 master; allowed is both true. "
                'For bf16 moments beside an fp32 master set tiermem.precision to {"moments": "bf16"}',
            )
        )
    for is_on, key in ((master, _BF16_MASTER), (states, _BF16_STATES)):
        if is_on:
            found += _unusable_switch(switches, key, "bf16")
    if master and not states and not found:
        found += _without_offload(switches, _BF16_MASTER, f", or {_BF16_STATES} true")
    if states and switches.fp32_states:
        found.append(
            (_FP32_STATES, f"true, but {_BF16_STATES} is true, which keeps moments in bf16; remove one of the two")
        )
    return found


def _fp16_problems(switches: Switches) -> Problems:
    if not switches.fp16.fp16_master_weights_and_grads:
        return []
    if switches.bf16.bf16_master_weights_and_grads:
        return [
            (_FP16_MASTER, f"true, and {_BF16_MASTER} is true; allowed is one of them, that of the section enabled")
        ]
    found = _unusable_switch(switches, _FP16_MASTER, "fp16")
    return found or _without_offload(switches, _FP16_MASTER, "")


def _unusable_switch(switches: Switches, key: str, section: str) -> Problems:
    """A switch outside stages 1 to 3, or whose section is off."""
    if switches.computed_in != section:
        return [
            (
                key,
                f"true with {section}.enabled false, but the weight itself is that master, and the model computes in "
                f"{switches.computed_in}; set {section}.enabled to true or remove the key",
            )
        ]
    if switches.zero.stage == 0:
        return [
            (
                key,
                "true with zero_optimization.stage 0, but masters and optimizer states are kept so in stages 1, 2 and 3 "
                "only, where they are the sharded optimizer's; set the stage",
            )
        ]
    return []


def _without_offload(switches: Switches, key: str, otherwise: str) -> Problems:
    if switches.zero.optimizer_device is not OffloadDevice.none:
        return []
    section = key.partition(".")[0]
    return [
        (
            key,
            f"true with {_DEVICE} none, but a {section} master beside fp32 moments is the CPU step's, of offloaded "
            f"states; allowed are {_DEVICE} cpu and nvme{otherwise}",
        )
    ]


def _param_dtype_problems(switches: Switches) -> Problems:
    given, kept = switches.data_types.param_dtype, switches.computed_in
    if given in (None, kept):
        return []
    how = f"set {given}.enabled" if given != "fp32" else f"set {kept}.enabled to false"
    return [("data_types.param_dtype", f"{given} given, but bf16 and fp16 say {kept}; remove the key or {how}")]


def _contradicted(switches: Switches) -> Problems:
    """Where tiermem.precision says one thing and a switch another."""
    own = switches.own.precision
    if own is None:
        return []
    found = []
    for ask in _asks(switches):
        value = own.asked.get(ask.field)
        if value is None or value == ask.value:
            continue
        path = f"tiermem.precision.{ask.field}" if own.is_set(ask.field) else "tiermem.precision"
        what = f"{value!r} given" if own.is_set(ask.field) else f"preset {own.preset!r} has {ask.field} {value!r}"
        found.append((path, f"{what}, but {ask.key} asks for {ask.value!r}; remove one of the two"))
    return found


def _unkept(switches: Switches) -> Problems:
    """A master that parameters of the config's dtype cannot have; unknown while no section casts the model."""
    dtype = switches.computed_in
    if dtype == "fp32" or switches.own.precision is None:
        return []
    try:
        precision_of(switches).check_dtype(DTYPES[dtype], f"of {dtype}.enabled")
    except ValueError as error:
        return [("tiermem.precision", str(error))]
    return []
