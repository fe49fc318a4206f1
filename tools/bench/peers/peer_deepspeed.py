"""DeepSpeed, ZeRO-3 with offload, one process: the peer that does the same job by its own means.

Built under its zero.Init, with the setting that the sweep hands in. Imports torch, transformers and deepspeed only; its
extensions compile at first use, which `python -I peer_deepspeed.py` does ahead of any measurement.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")
for _name, _value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_SIZE", "1")):
    os.environ.setdefault(_name, _value)


def build(job: dict[str, Any], setting: dict[str, Any], phase: Callable[[str], None]) -> Any:
    """A PeerModel; see peer_main.py."""
    import torch

    deepspeed: Any = importlib.import_module("deepspeed")
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    _join(deepspeed)
    config = {key: value for key, value in job["config"].items() if key not in ("tiermem", "zero_optimization", "aio")}
    config |= setting
    shape = transformers.AutoConfig.for_model(**job["shape"])
    with torch.device("meta"):  # what building imports must come in before zero.Init has replaced torch's constructors
        transformers.AutoModelForCausalLM.from_config(shape)
    phase("building the model")
    torch.manual_seed(job["seed"])
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = transformers.AutoModelForCausalLM.from_config(shape)
    model.train()
    if job["is_checkpointing"]:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    phase("initialize")
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    return sys.modules["__main__"].PeerModel(
        num_params=sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
        device="cpu" if str(engine.device).startswith("cpu") else str(engine.device),
        forward=lambda tokens: engine(input_ids=tokens, labels=tokens).loss,
        backward=engine.backward,
        step=engine.step,
        close=engine.destroy,
        versions={
            "deepspeed": deepspeed.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    )


def compile_extensions() -> None:
    """Builds what DeepSpeed compiles at first use, without a cap and before any clock."""
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    for builder in (builders.CPUAdamBuilder(), builders.AsyncIOBuilder()):
        builder.load()
        print(f"{builder.name} is ready")


def _join(deepspeed: Any) -> None:
    """A process group of one that meets in its own memory: no port or file that another run might hold."""
    import torch

    store: Any = vars(torch.distributed)["HashStore"]()
    backend = "nccl" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend)


if __name__ == "__main__":
    compile_extensions()
