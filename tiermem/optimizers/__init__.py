"""Optimizers, each in one file: the section of the config, the rule with its moments and scalars,
torch's arguments and checks.

    class LionParams      the keys of `optimizer.params`, which config/optimizer.py reads
    LION, _lion_scalars   what a step computes; the kernels behind it are named in swap/base/parts.py
    class LionFace        what is Lion's own of the class `tiermem.Lion` (optim/__init__.py), whose steps are every
                          optimizer's

A new optimizer takes

    its file here
    its line in PARAMS, at its place in the order there
    its rule in _RULES, if it keeps a moment that no rule there keeps
    its class in optim/__init__.py
    its name in tiermem/__init__.py
    its name in docs/precision.md, the one list of names
    docs/keys.md and tests/public_names.txt, which are generated
    its settings in FLIPS of tests/engine/test_keys_on_a_run.py
    a claim in tests/config/key_claims.py for each setting that no other optimizer has

Its rule, if it is new, takes

    enum tm_rule, with its formula, in native/tiermem.h
    a loop in native/loops_rules.h, named in loops.h and optimizer.cpp
    its moments in MOMENTS of swap/base/parts.py
    the same formula in swap/kernels/torch_step.py and triton_step.py
    the same formula in tests/native/test_optimizer.cpp
    its line in RULES of tests/swap/test_torch_step.py

They stand below config/ and optim/, since both read them. Files in order; each imports only files
before it:

    base      what every optimizer has
    adam      Adam and AdamW
    adagrad
    lion
    sgd
    muon      a step of whole matrices, and AdamW for all other parameters
"""

from __future__ import annotations

from collections.abc import Mapping

from tiermem.optimizers.adagrad import ADAGRAD, AdagradParams
from tiermem.optimizers.adam import AdamParams, adam
from tiermem.optimizers.base import OptimizerParams
from tiermem.optimizers.lion import LION, LionParams
from tiermem.optimizers.muon import ADAMW_OF_MUON, MATRIX, MuonParams
from tiermem.optimizers.sgd import SgdParams, sgd
from tiermem.swap.base.parts import MOMENTS

PARAMS: Mapping[str, type[OptimizerParams]] = {
    "AdamW": AdamParams,
    "Adam": AdamParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Muon": MuonParams,
    "SGD": SgdParams,
}
"""The settings of each optimizer, by the name of its class.

The first that fits an optimizer or a checkpoint is taken. AdamW comes before Adam, since it is one.
Lion comes after AdamW, and SGD after Muon: the states and settings of those have their marks, too.
"""

_RULES = (
    adam(is_decoupled=True, amsgrad=True),
    ADAGRAD,
    LION,
    sgd(has_momentum=True),
    MATRIX,
    ADAMW_OF_MUON,
)
"""Rules that together have every moment."""

KEPT_MOMENTS = {moment for rule in _RULES for moment in rule.moments}
"""Every moment, named as in torch."""

NEVER_NEGATIVE = frozenset(
    moment
    for rule in _RULES
    for moment, kind in zip(rule.moments, MOMENTS[rule.code], strict=False)
    if kind.is_positive
)
"""Moments, named as in torch, that are never negative."""
