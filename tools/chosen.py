"""Chosen: what a budget leaves open in a run, settled by predicted time before the model is built, as keys of its config.

    measured rates -> forecast/choice.py, on the model without memory -> config, and a line that says what and why
    policy field      grads          tile_numel      tile_buffers                    unit_buffers               host_param_numel
    key               tiermem.grads  sub_group_size  offload_optimizer.buffer_count  offload_param.buffer_count  max_in_cpu

So a run can be repeated from its config alone. Where the rule's plan is the fastest nothing is set.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tiermem.tools.train_config import Config

if TYPE_CHECKING:
    from tiermem.forecast import Rates
    from tiermem.forecast.rates import Compute

_PLACES = {
    "grads": ("tiermem", "grads"),
    "tile_numel": ("zero_optimization", "sub_group_size"),
    "tile_buffers": ("zero_optimization", "offload_optimizer", "buffer_count"),
    "unit_buffers": ("zero_optimization", "offload_param", "buffer_count"),
    "host_param_numel": ("zero_optimization", "offload_param", "max_in_cpu"),
}


def choose_config(
    config: Config, shape: Mapping[str, Any], rates: Rates, compute: Compute
) -> tuple[Config, str | None]:
    """The config of a run on one rank with what it leaves open settled, and the line to show; None: nothing to say.

    Raises ValueError for a config that cannot be.
    """

    from tiermem.config import load_config, resolve_auto
    from tiermem.forecast import choose
    from tiermem.swap.accelerator import find_device, is_accelerator
    from tiermem.tools.budget import ModelSizes
    from tiermem.tools.planned import meta_model

    loaded = resolve_auto(load_config(config), ModelSizes.of(shape).hidden)
    policy = loaded.policy()
    if policy.host_bytes is None:
        return config, None
    model, is_gpu = meta_model(shape, loaded.precision), is_accelerator(find_device())
    try:
        choice = choose(model, policy, rates, compute, is_gpu=is_gpu, num_micro=loaded.batch(1).accumulation)
    except ValueError:
        return config, None  # nothing fits: building the model says why
    return with_choice(config, choice.chosen.fields), str(choice)


def with_choice(config: Config, fields: Mapping[str, Any]) -> Config:
    """The config with chosen fields of the policy as keys of its own."""
    from tiermem.config.offload import STATES_PER_TILE
    from tiermem.policy import Tier

    found: Any = copy.deepcopy(config)
    for name, value in fields.items():
        place = found
        *path, key = _PLACES[name]
        for section in path:
            place = place.setdefault(section, {})
        if isinstance(value, Tier):
            place[key] = "nvme" if value is Tier.NVME else "cpu"
        else:
            place[key] = value * STATES_PER_TILE if name == "tile_buffers" else value
    return dict(found)
