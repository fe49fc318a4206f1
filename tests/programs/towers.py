"""Programs: models with difficult habits, each trained for four steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from torch import nn

from programs import models
from programs.faces import Face, Found, Program, fit
from programs.twins import loss_of

MODELS: dict[str, Callable[[], nn.Module]] = {
    "nanogpt": models.NanoGPT,
    "llama": models.llama,
    "llama, tied": functools.partial(models.llama, tied=True),
    "llama, checkpointed": functools.partial(models.checkpointed_llama, False),
    "llama, checkpointed reentrantly": functools.partial(models.checkpointed_llama, True),
    "bare containers": models.BareContainers,
    "tied": models.tied_tower,
    "frozen": models.frozen_tower,
    "unused blocks": functools.partial(models.ShortTower, skips=True),
}
for _outputs, _checkpoint, _rounds in itertools.product(
    ("tensor", "dict", "dataclass"), (None, False, True), (1, 2)
):
    MODELS[f"{_outputs}, checkpoint {_checkpoint}, {_rounds} rounds"] = functools.partial(
        models.tied_tower if _rounds == 2 else models.ShortTower,
        outputs=_outputs,
        checkpoint=_checkpoint,
        rounds=_rounds,
    )


def trained(face: Face, build: Callable[[], nn.Module]) -> Found:
    return fit(face, build(), loss_of, num_steps=4)


PROGRAMS: dict[str, Program] = {
    name: functools.partial(trained, build=build) for name, build in MODELS.items()
}
