"""A script that uses DeepSpeed through the Trainer and Accelerate on several ranks; as_deepspeed
runs it on each.

deepspeed_on_ranks.py FOLDER     every rank writes {run: log} to FOLDER/<rank>.json

Where `accelerate launch` has chosen DeepSpeed, it trains with the launcher's plugin alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import as_deepspeed_cases as cases
import torch.distributed as dist


def runs(folder: Path) -> dict[str, Any]:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        found: dict[str, Any] = {"plugin of the launcher": cases.loop(None)}
        cases.begin_anew(keeps_group=True)
        return found | {"plain loop": cases.loop(None)}
    found = {}
    saves = {"save_strategy": "steps", "save_steps": 3}
    for stage in cases.STAGES:
        config = cases.config_of(stage, "optimizer", "scheduler")
        found[stage] = cases.log(cases.train(folder / stage, config, **saves))
        cases.begin_anew(keeps_group=True)
        resume = str(folder / stage / "checkpoint-3")
        found[f"{stage} resumed"] = cases.log(cases.train(folder / stage, config, resume, **saves))
        cases.begin_anew(keeps_group=True)
    found["plain"] = cases.log(cases.train(folder / "plain", None))
    cases.begin_anew(keeps_group=True)
    for stage in (1, 2, 3):
        found[f"loop {stage}"] = cases.loop(cases.plugin(stage, gradient_accumulation_steps=2))
        cases.begin_anew(keeps_group=True)
    return found | {"plain loop": cases.loop(None)}


def main() -> None:
    folder = Path(sys.argv[1])
    found = runs(folder)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
