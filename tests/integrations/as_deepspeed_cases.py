"""Uses of DeepSpeed through transformers and Accelerate, run with tiermem answering, and a table of
their results.

    python -m tiermem.as_deepspeed tests/integrations/as_deepspeed_cases.py FOLDER [WORDS]

Each case asks what a test of transformers' tests/deepspeed/test_deepspeed.py or of Accelerate's
tests/deepspeed asks, under the same name, written anew with tiny models built from configs; the
source distributions do not hold these files. FOLDER is for files; WORDS choose cases by a part of
their name. The script prints the table of docs/as_deepspeed.md. A case is passed, refused with a
reason, or failed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import itertools
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from accelerate.utils.deepspeed import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
)
from tiny_models import build, samples
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import (
    HfDeepSpeedConfig,
    deepspeed_config,
    is_deepspeed_zero3_enabled,
    unset_hf_deepspeed_config,
)

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
STEPS = 6


class Case(NamedTuple):
    """One use of DeepSpeed."""

    library: str
    test: str  # the name of the library's own test
    done: str
    values: tuple[Any, ...]  # arguments of `run`
    run: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.test + (f"[{'-'.join(map(str, self.values))}]" if self.values else "")


class Refused(Exception):
    """What tiermem answers to something that it does not do."""


CASES: list[Case] = []


def case(library: str, test: str, done: str, *variants: Any) -> Callable[[Any], Any]:
    """Registers a function as a case; with variants, as one case for each."""

    def register(function: Any) -> Any:
        for each in variants or ((),):
            CASES.append(
                Case(library, test, done, each if isinstance(each, tuple) else (each,), function)
            )
        return function

    return register


# ---- what the cases use --------------------------------------------------------------------------

AUTO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
OPTIMIZER = {
    "type": "AdamW",
    "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
}
SCHEDULER = {
    "type": "WarmupLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}
ON_CPU = {"device": "cpu", "pin_memory": True}
STAGES: dict[str, dict[str, Any]] = {
    "zero2": {
        "stage": 2,
        "offload_optimizer": ON_CPU,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "zero3": {
        "stage": 3,
        "offload_optimizer": ON_CPU,
        "offload_param": ON_CPU,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 1,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BOTH = [(stage, dtype) for stage in STAGES for dtype in ("fp16", "bf16", "fp32")]


def config_of(stage: str, *without: str) -> dict[str, Any]:
    """A config as Hugging Face publishes them, without some of its sections."""
    found = {
        **dict.fromkeys(AUTO, "auto"),
        "fp16": FP16,
        "bf16": {"enabled": "auto"},
        "optimizer": OPTIMIZER,
        "scheduler": SCHEDULER,
        "zero_optimization": STAGES[stage],
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    return {key: copy.deepcopy(value) for key, value in found.items() if key not in without}


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    asked = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    return TrainingArguments(str(folder), **{**asked, **given})


def train(
    folder: Path,
    config: Any,
    resume: Any = None,
    dtype: str = "fp32",
    name: str = "gpt2",
    **given: Any,
) -> Any:
    """Trains with the plain Trainer and this DeepSpeed config (None: without one). Returns the
    trainer."""
    precision = {} if dtype == "fp32" else {dtype: True}
    args = arguments(folder, deepspeed=config, **precision, **given)
    trainer = Trainer(build(name), args, train_dataset=samples(name), eval_dataset=samples(name, 8))
    assert trainer.is_deepspeed_enabled == (config is not None)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def log(trainer: Any, *keys: str) -> list[list[float]]:
    return [
        [each[key] for key in keys or ("loss", "grad_norm", "learning_rate")]
        for each in trainer.state.log_history
        if "loss" in each
    ]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: each.clone().float() for name, each in trainer.deepspeed.module.state_dict().items()
    }


def close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.tensor(actual), torch.tensor(expected), rtol=tolerance, atol=tolerance
    )


@contextlib.contextmanager
def raises(sentence: str, kind: type[BaseException] = ValueError) -> Iterator[None]:
    """The block raises an error that a pattern matches."""
    said = None
    try:
        yield
    except kind as error:
        said = str(error)
    assert said is not None, f"nothing raised {kind.__name__} of {sentence!r}"
    assert re.search(sentence, said), said


@contextlib.contextmanager
def refused(sentence: str, kind: type[BaseException] = ValueError) -> Iterator[None]:
    """The block is refused with a sentence that a pattern matches: the result of the case."""
    try:
        yield
    except kind as error:
        found = re.search(sentence, str(error))
        if not found:
            raise
        raise Refused(found[0]) from error
    raise AssertionError(f"nothing was refused with {sentence!r}")


def begin_anew(keeps_group: bool = False) -> None:
    """Forgets the state of transformers and Accelerate, as their own tests do between tests."""
    unset_hf_deepspeed_config()
    for name in [*os.environ]:
        # TrainingArguments(deepspeed=...) sets one, and leaves it
        if name.startswith("ACCELERATE_"):
            del os.environ[name]
    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()
    if dist.is_initialized() and not keeps_group:
        dist.destroy_process_group()
    gc.collect()


def saved(name: str = "gpt2") -> Path:
    folder = FOLDER / "models" / name
    if not folder.is_dir():
        build(name).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def messages(name: str = "transformers") -> Iterator[list[str]]:
    """Collects what a logger says."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# ---- transformers: models and configs ------------------------------------------------------------

DETECTED = "Detected DeepSpeed ZeRO-3"


@case(
    "transformers",
    "test_init_zero3",
    "from_pretrained under a stage 3 config uses zero.Init, and not without one",
    "fp32",
    "fp16",
    "bf16",
)
def init_zero3(folder: Path, dtype: str) -> None:
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, **precision}
    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(saved("t5")).state_dict()
    kept = HfDeepSpeedConfig(config)
    assert kept.is_zero3() and is_deepspeed_zero3_enabled()
    with messages() as said:
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(saved("t5"))
    assert any(DETECTED in each for each in said)
    expected = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.data, plain[name].to(expected), rtol=0, atol=0)
    del config["zero_optimization"]
    kept = HfDeepSpeedConfig(config)
    assert not kept.is_zero3() and not is_deepspeed_zero3_enabled()
    with messages() as said:
        transformers.AutoModelForSeq2SeqLM.from_pretrained(saved("t5"))
    assert not any(DETECTED in each for each in said)


@case(
    "transformers",
    "test_init_zero3_missing_params",
    "weights that the files lack get the model's own initial values",
)
def missing_params(folder: Path) -> None:
    import deepspeed
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model, GPT2PreTrainedModel

    class WithHead(GPT2PreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.transformer = GPT2Model(config)
            self.new_head = torch.nn.Linear(config.hidden_size, config.vocab_size)
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            super()._init_weights(module)
            if module is self.new_head:
                torch.nn.init.constant_(self.new_head.weight, -100.0)
                torch.nn.init.constant_(self.new_head.bias, 100.0)

    kept = HfDeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 3}})
    model = WithHead.from_pretrained(saved("gpt2"))
    with deepspeed.zero.GatheredParameters([model.new_head.weight, model.new_head.bias]):
        assert (model.new_head.weight == -100.0).all() and (model.new_head.bias == 100.0).all()
    plain = build("gpt2").state_dict()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        torch.testing.assert_close(
            model.transformer.wte.weight.data, plain["transformer.wte.weight"], rtol=0, atol=0
        )
    assert kept.is_zero3()


@case(
    "transformers",
    "test_arange_bf16",
    "tables that a model computes in fp32 stay fp32 under a bf16 config",
)
def arange_bf16(folder: Path) -> None:
    kept = HfDeepSpeedConfig(
        {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"))
    plain = build("llama")
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16} and kept.is_zero3()
    found, expected = dict(model.named_buffers()), dict(plain.named_buffers())
    assert found.keys() == expected.keys() and len(found) > 0
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=0)


# ---- transformers: the Trainer -------------------------------------------------------------------


@case(
    "transformers",
    "test_hf_ds_config_mismatch",
    "values that contradict TrainingArguments are listed",
)
def mismatch(folder: Path) -> None:
    config = config_of("zero2")
    config |= {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "train_batch_size": 1000,
    }
    config |= {"gradient_clipping": 1.1}
    config["optimizer"]["params"]["betas"] = [0.8, 0.89]
    with raises(
        "(?s)per_device_train_batch_size.*gradient_accumulation_steps.*train_batch_size.*max_grad_norm.*betas"
    ):
        train(folder, config)


def warmed_up(step: int) -> float:
    """The factor of DeepSpeed's WarmupLR, linear, two steps: its first two steps have the smallest
    rate."""
    return min(1.0, max(0, step - 1) / 2)


def plain(folder: Path, scheduler: str, **given: Any) -> Any:
    """Trains without a DeepSpeed config; `scheduler` "ds" steps rates as WarmupLR does."""
    args = arguments(folder, **given)
    model = build("gpt2")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmed_up)
    optimizers = (optimizer, schedule) if scheduler == "ds" else (None, None)
    trainer = Trainer(model, args, train_dataset=samples("gpt2"), optimizers=optimizers)
    trainer.train()
    return trainer


def with_sections(stage: str, scheduler: str, optimizer: str) -> dict[str, Any]:
    """A config with a scheduler or an optimizer of its own ("ds"), or without ("hf")."""
    without = [
        key for key, whose in (("scheduler", scheduler), ("optimizer", optimizer)) if whose == "hf"
    ]
    config = config_of(stage, *without)
    if scheduler == "ds":
        config["scheduler"]["params"]["warmup_type"] = "linear"
    return config


MIXED = [
    (stage, scheduler, optimizer)
    for stage in STAGES
    for scheduler in ("hf", "ds")
    for optimizer in ("hf", "ds")
]


@case(
    "transformers",
    "test_SCHEDULER_scheduler_OPTIMIZER_optimizer",
    "fp32 losses and norms are the plain Trainer's",
    *MIXED,
)
def pairs(folder: Path, stage: str, scheduler: str, optimizer: str) -> None:
    found = log(train(folder, with_sections(stage, scheduler, optimizer)), "loss", "grad_norm")
    begin_anew()
    close(found, log(plain(folder / "plain", scheduler), "loss", "grad_norm"), 2e-6)


@case(
    "transformers",
    "test_stage3_nvme_offload",
    "parameters and states in a folder",
    "fp32",
    "fp16",
    "bf16",
)
def nvme(folder: Path, dtype: str) -> None:
    place = {"device": "nvme", "nvme_path": str(folder)}
    on_cpu = log(train(folder / "cpu", config_of("zero3"), dtype=dtype))
    begin_anew()
    config = config_of("zero3")
    config["zero_optimization"] |= {"offload_optimizer": place, "offload_param": place}
    assert log(train(folder / "nvme", config, dtype=dtype)) == on_cpu


@case(
    "transformers",
    "test_hyperparameter_search",
    "a trainer with model_init trains a new model each time; losses repeat",
)
def search(folder: Path) -> None:
    args = arguments(folder, deepspeed=config_of("zero3"))
    trainer = Trainer(None, args, train_dataset=samples("gpt2"), model_init=lambda: build("gpt2"))
    found = []
    for _ in range(2):
        trainer.train()
        found.append(log(trainer))
    assert found[0] == found[1]


@case("transformers", "test_hf_optimizer_with_offload", "zero_force_ds_cpu_optimizer false", *BOTH)
def own_optimizer(folder: Path, stage: str, dtype: str) -> None:
    config = {**config_of(stage, "optimizer"), "zero_force_ds_cpu_optimizer": False}
    found = log(train(folder, config, dtype=dtype), "loss")
    begin_anew()
    assert found == log(train(folder, config_of(stage, "optimizer"), dtype=dtype), "loss")


@case(
    "transformers",
    "test_fake_notebook_no_launcher",
    "a process that no launcher started; losses beside fp32",
    *BOTH,
)
def notebook(folder: Path, stage: str, dtype: str) -> None:
    found = log(train(folder, with_sections(stage, "ds", "ds"), dtype=dtype), "loss")
    begin_anew()
    close(found, log(plain(folder / "plain", "ds"), "loss"), 2e-6 if dtype == "fp32" else 2e-2)


@case(
    "transformers",
    "test_early_get_last_lr",
    "rates are logged while a loss scale is still too large for a step",
    "zero2",
    "zero3",
)
def early(folder: Path, stage: str) -> None:
    config = config_of(stage)
    config["fp16"]["initial_scale_power"] = 32
    trainer = train(folder, config, dtype="fp16", max_steps=2)
    plain = build("gpt2").half().float().state_dict()
    torch.testing.assert_close(weights(trainer), dict(plain), rtol=0, atol=0)
    assert [rate for (rate,) in log(trainer, "learning_rate")] == [0.0, 0.0]


@case(
    "transformers",
    "test_gradient_accumulation",
    "4 micro-batches of 4 give the weights of a batch of 16",
    *BOTH,
)
def accumulation(folder: Path, stage: str, dtype: str) -> None:
    found = []
    for micro, number in ((16, 1), (4, 4)):
        given = {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": number,
            "max_steps": 4,
        }
        trainer = train(folder, config_of(stage), dtype=dtype, name="llama", **given)
        found.append((weights(trainer), log(trainer, "loss")))
        begin_anew()
    tolerance = 1e-5 if dtype == "fp32" else 5e-3
    torch.testing.assert_close(found[0][0], found[1][0], rtol=tolerance, atol=tolerance)
    close(found[0][1], found[1][1], 1e-3)


@case(
    "transformers",
    "test_save_checkpoints",
    "the Trainer's files and the step's folder; inside are tiermem's files",
    *BOTH,
)
def save_checkpoints(folder: Path, stage: str, dtype: str) -> None:
    train(folder, config_of(stage), dtype=dtype, save_strategy="steps", save_steps=2)
    for step in range(2, STEPS + 1, 2):
        names = {each.name for each in (folder / f"checkpoint-{step}").iterdir()}
        assert {
            "model.safetensors",
            "training_args.bin",
            "trainer_state.json",
            "config.json",
            f"global_step{step}",
            "latest",
        } <= names
        assert "optimizer.pt" not in names


@case(
    "transformers", "test_can_resume_training_errors", "no checkpoint, and one that does not exist"
)
def resume_errors(folder: Path) -> None:
    with raises("No valid checkpoint found in output directory"):
        train(folder, config_of("zero3"), resume=True)
    begin_anew()
    with raises("bogus", Exception):
        train(folder, config_of("zero3"), resume=str(folder / "checkpoint-bogus"))


RESUMES = [
    (*both, *pair)
    for both in BOTH
    for pair in (("hf", "hf"), ("ds", "hf"), ("hf", "ds"), ("ds", "ds"))
]


@case(
    "transformers",
    "test_can_resume_training_normal",
    "weights, losses and rates after resuming are those of one run, to the bit",
    *RESUMES,
)
def resume(folder: Path, stage: str, dtype: str, scheduler: str, optimizer: str) -> None:
    config, given = (
        with_sections(stage, scheduler, optimizer),
        {"dtype": dtype, "save_strategy": "steps", "save_steps": 2},
    )
    whole = train(folder, config, **given)
    expected = log(whole), weights(whole)
    begin_anew()
    again = train(folder, config, resume=str(folder / "checkpoint-4"), **given)
    assert log(again) == expected[0]
    torch.testing.assert_close(weights(again), expected[1], rtol=0, atol=0)


@case(
    "transformers",
    "test_load_state_dict_from_zero_checkpoint",
    "fp32 weights of a checkpoint, loaded into a model",
    *BOTH,
)
def zero_to_fp32(folder: Path, stage: str, dtype: str) -> None:
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    trainer = train(folder, config_of(stage), dtype=dtype, save_strategy="steps", save_steps=STEPS)
    model = load_state_dict_from_zero_checkpoint(build("gpt2"), str(folder / f"checkpoint-{STEPS}"))
    expected = weights(trainer)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    found = {name: each.to(kind).float() for name, each in model.state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@case(
    "transformers",
    "test_ds_config_object",
    "stage 3, then stage 2, in one process; the config goes with the trainer",
)
def config_object(folder: Path) -> None:
    trainer = train(folder, config_of("zero3"), max_steps=1)
    assert is_deepspeed_zero3_enabled()
    begin_anew()
    trainer = train(folder, config_of("zero2"), max_steps=1)
    assert not is_deepspeed_zero3_enabled() and deepspeed_config()
    trainer.accelerator.state._reset_state()
    del trainer
    gc.collect()
    assert not is_deepspeed_zero3_enabled() and not deepspeed_config()


BEST = {
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
}


@case(
    "transformers",
    "test_load_best_model",
    "the best checkpoint is opened at the end; evaluation follows",
    *BOTH,
)
def best_model(folder: Path, stage: str, dtype: str) -> None:
    trainer = train(
        folder, config_of(stage, "optimizer", "scheduler"), dtype=dtype, name="t5", **BEST
    )
    found = {
        each["step"]: each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each
    }
    step = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    close(trainer.evaluate()["eval_loss"], found[step], 1e-5)


@case(
    "transformers",
    "test_load_best_model (optim=adafactor)",
    "an optimizer that tiermem does not have",
)
def adafactor(folder: Path) -> None:
    with refused("Adafactor cannot step states that rest on tiers"):
        config = {
            **config_of("zero3", "optimizer", "scheduler"),
            "zero_force_ds_cpu_optimizer": False,
        }
        train(folder, config, optim="adafactor")


@case(
    "transformers",
    "test_do_eval_no_train",
    "evaluation alone under stage 3 gives the plain loss",
    "fp32",
    "bf16",
)
def eval_alone(folder: Path, dtype: str) -> None:
    found = []
    for config in (config_of("zero3"), None):
        args = arguments(folder, deepspeed=config, **({"bf16": True} if dtype == "bf16" else {}))
        found.append(
            Trainer(build("gpt2"), args, eval_dataset=samples("gpt2", 8)).evaluate()["eval_loss"]
        )
        begin_anew()
    close(found[0], found[1], 1e-6 if dtype == "fp32" else 2e-2)


@case(
    "transformers",
    "test_resume_train_not_from_ds_checkpoint",
    "training from the folder of a saved model",
    *BOTH,
)
def from_saved(folder: Path, stage: str, dtype: str) -> None:
    first = train(folder, config_of(stage), dtype=dtype)
    first.save_model(str(folder / "saved"))
    expected = weights(first)
    begin_anew()
    args = arguments(
        folder,
        deepspeed=config_of(stage),
        max_steps=1,
        **({} if dtype == "fp32" else {dtype: True}),
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved")
    trainer = Trainer(model, args, train_dataset=samples("gpt2"), eval_dataset=samples("gpt2", 8))
    # transformers evaluates under stage 3 alone
    before = trainer.evaluate if stage == "zero3" else None
    trainer.train()
    assert len(log(trainer)) == 1 and (before is None or trainer.evaluate()["eval_loss"] > 0)
    assert expected.keys() == weights(trainer).keys()


# ---- Accelerate ----------------------------------------------------------------------------------


def plugin(stage: int, **given: Any) -> DeepSpeedPlugin:
    places = {
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu" if stage == 3 else "none",
    }
    return DeepSpeedPlugin(**{"zero_stage": stage, "gradient_clipping": 1.0, **places, **given})


def accelerator_of(deepspeed_plugin: Any = None, **given: Any) -> Accelerator:
    """An Accelerator. With cpu=True, Accelerate would leave DeepSpeed out and say nothing."""
    is_plain = deepspeed_plugin is None and "ACCELERATE_USE_DEEPSPEED" not in os.environ
    group = (
        [InitProcessGroupKwargs(backend="gloo")] if "LOCAL_RANK" in os.environ else []
    )  # Accelerate looks for a GPU's
    found = Accelerator(
        cpu=is_plain, deepspeed_plugin=deepspeed_plugin, kwargs_handlers=group, **given
    )
    assert (found.distributed_type == DistributedType.DEEPSPEED) == (not is_plain), (
        found.distributed_type
    )
    return found


def loader(batch_size: int = 2, name: str = "llama") -> DataLoader[Any]:
    return DataLoader(samples(name, 24), batch_size)


def loop(
    deepspeed: DeepSpeedPlugin | None,
    dtype: str = "no",
    accumulation: int = 2,
    kind: Any = torch.optim.AdamW,
) -> list[list[float]]:
    """Six micro-batches with a user's optimizer and schedule. Returns [loss, norm, rate] of
    each."""
    accelerator = accelerator_of(
        deepspeed_plugin=deepspeed, mixed_precision=dtype, gradient_accumulation_steps=accumulation
    )
    model = build("llama")
    optimizer = kind(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader(), schedule)
    found = []
    for batch in itertools.islice(batches, 6):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = (
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if accelerator.sync_gradients
                else 0.0
            )
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append([float(loss), float(norm), schedule.get_last_lr()[0]])
    accelerator.free_memory()
    return found


@case(
    "accelerate",
    "test_accelerate_state_deepspeed",
    "the plugin's config has the Accelerator's precision",
    "fp16",
    "bf16",
)
def state(folder: Path, dtype: str) -> None:
    accelerator = accelerator_of(mixed_precision=dtype, deepspeed_plugin=plugin(2))
    assert accelerator.state.deepspeed_plugin.deepspeed_config[dtype]["enabled"]


@case("accelerate", "test_init_zero3", "the plugin turns on zero.Init in from_pretrained")
def init_of_plugin(folder: Path) -> None:
    accelerator_of(deepspeed_plugin=plugin(3, zero3_init_flag=True))
    assert is_deepspeed_zero3_enabled()
    with messages() as said:
        transformers.AutoModelForCausalLM.from_pretrained(saved("gpt2"))
    assert any(DETECTED in each for each in said)


@case(
    "accelerate",
    "test_prepare_deepspeed",
    "the objects that prepare returns have DeepSpeed's kinds",
    *itertools.product(("custom", "ds"), ("custom", "ds")),
)
def prepare(folder: Path, optimizer_kind: str, scheduler_kind: str) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    config = config_of(
        "zero2",
        *["optimizer"] * (optimizer_kind == "custom"),
        *["scheduler"] * (scheduler_kind == "custom"),
    )
    config["fp16"]["enabled"] = config["bf16"]["enabled"] = False
    for section, key in (("optimizer", "betas"), ("optimizer", "eps")):
        if section in config:
            del config[section]["params"][key]
    accelerator = accelerator_of(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = build("llama")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-5)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    dummy = DummyOptim(model.parameters()), DummyScheduler(DummyOptim(model.parameters()), 10, 2)
    wrong = (
        dummy if (optimizer_kind, scheduler_kind) == ("custom", "custom") else (optimizer, schedule)
    )
    if optimizer_kind == scheduler_kind:
        with raises("specify|specifying|in the config file"):
            accelerator.prepare(model, wrong[0], loader(), wrong[1])
    if (optimizer_kind, scheduler_kind) == ("ds", "custom"):
        with raises("You can only specify `accelerate.utils.DummyScheduler`"):
            accelerator.prepare(model, dummy[0], loader(), schedule)
        return
    given = (
        dummy[0] if optimizer_kind == "ds" else optimizer,
        dummy[1] if scheduler_kind == "ds" else schedule,
    )
    model, optimizer, _, schedule = accelerator.prepare(model, given[0], loader(), given[1])
    assert type(model) is DeepSpeedEngine and type(optimizer) is DeepSpeedOptimizerWrapper
    assert type(schedule) is (
        DeepSpeedSchedulerWrapper if scheduler_kind == "ds" else AcceleratedScheduler
    )
    assert type(accelerator.deepspeed_engine_wrapped) is DeepSpeedEngineWrapper


@case(
    "accelerate",
    "test_save_checkpoints",
    "get_state_dict without stage3_gather_16bit_weights_on_model_save",
)
def no_state_dict(folder: Path) -> None:
    config = config_of("zero3", "fp16", "bf16", "scheduler", "optimizer")
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    accelerator = accelerator_of(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model, _ = accelerator.prepare(build("llama"), loader())
    with raises("`stage3_gather_16bit_weights_on_model_save` in DeepSpeed config is False"):
        accelerator.get_state_dict(model)


@case(
    "accelerate",
    "test_autofill_dsconfig",
    'values that are "auto" are those of the model, the loader and the optimizer',
)
def autofill(folder: Path) -> None:
    config = config_of("zero3", "fp16", "bf16")
    for key in ("betas", "eps"):
        del config["optimizer"]["params"][key]
    accelerator = accelerator_of(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = build("llama")
    optimizer = DummyOptim(model.parameters(), lr=5e-5, weight_decay=1e-4)
    prepared = accelerator.prepare(model, optimizer, loader(4), DummyScheduler(optimizer, 1000, 10))
    found = accelerator.deepspeed_config
    assert (found["train_micro_batch_size_per_gpu"], found["train_batch_size"]) == (4, 4)
    assert found["optimizer"]["params"] == {"lr": 5e-5, "weight_decay": 1e-4}
    assert found["scheduler"]["params"]["warmup_max_lr"] == 5e-5
    assert found["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert prepared[0].optimizer.param_groups[0]["weight_decay"] == 1e-4


LOOPS = [
    (stage, dtype, number)
    for stage in (1, 2, 3)
    for dtype in ("no", "bf16", "fp16")
    for number in (1, 2)
]


@case(
    "accelerate",
    "test_gradient_accumulation_boundary_integration",
    "losses, norms and rates are the plain Accelerator's",
    *LOOPS,
)
def loops(folder: Path, stage: int, dtype: str, number: int) -> None:
    found = loop(plugin(stage, gradient_accumulation_steps=number), dtype, number)
    begin_anew()
    expected = loop(None, accumulation=number)
    if dtype == "fp16":  # a large loss scale skips the first steps
        assert all(math.isfinite(loss) for loss, *_ in found)
    else:
        close(found, expected, 2e-6 if dtype == "no" else 3e-2)


@case(
    "accelerate",
    "test_clip_grad_norm_returns_deepspeed_grad_norm",
    "Adam and Adagrad of torch under offload",
    "Adam",
    "Adagrad",
)
def kinds(folder: Path, name: str) -> None:
    kind = getattr(torch.optim, name)
    found = loop(plugin(2, gradient_accumulation_steps=2), kind=kind)
    begin_anew()
    close(found, loop(None, kind=kind), 2e-6)


@case(
    "accelerate",
    "test_checkpoint_with_new_engine",
    "save_state, and load_state in a new engine, to the bit",
    1,
    2,
    3,
)
def states(folder: Path, stage: int) -> None:
    def run(first: int, last: int) -> list[float]:
        accelerator = accelerator_of(deepspeed_plugin=plugin(stage, gradient_accumulation_steps=1))
        model = build("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        model, optimizer, batches, schedule = accelerator.prepare(
            model, optimizer, loader(), schedule
        )
        if first:
            accelerator.load_state(str(folder / "state"))
        found = []
        for batch in itertools.islice(batches, first, last):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            found += [float(loss), schedule.get_last_lr()[0]]
            if len(found) == 6 and not first:
                accelerator.save_state(str(folder / "state"))
        return found

    whole = run(0, 6)
    begin_anew()
    assert run(3, 6) == whole[6:]


@case(
    "accelerate",
    "test_parameter_group_learning_rates",
    "a rate for each group of parameters",
    "WarmupLR",
    "WarmupDecayLR",
)
def group_rates(folder: Path, name: str) -> None:
    import deepspeed

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1e-5)
    total = {"total_num_steps": 20} if name == "WarmupDecayLR" else {}
    kind = getattr(deepspeed.runtime.lr_schedules, name)
    schedule = kind(
        optimizer, warmup_max_lr=[0.03, 0.0002], warmup_num_steps=4, warmup_type="linear", **total
    )
    for step in range(12):
        schedule.step()
        factor = step / 4 if step < 4 else (20 - step) / 16 if total else 1
        close([group["lr"] for group in optimizer.param_groups], [0.03 * factor, 0.0002 * factor])


@case("accelerate", "test_optimizer_rebuilt_by_zero", "the inside of DeepSpeed's ZeRO optimizer")
def inside(folder: Path) -> None:
    with refused("No module named 'deepspeed.runtime.zero.stage_1_and_2'", ModuleNotFoundError):
        importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")


def two_plugins() -> dict[str, DeepSpeedPlugin]:
    without = "fp16", "bf16", "optimizer", "scheduler"
    return {stage: DeepSpeedPlugin(hf_ds_config=config_of(stage, *without)) for stage in STAGES}


@case(
    "accelerate",
    "test_select_plugin, test_enable_disable_manually_set, test_multiple_accelerators",
    "two plugins, one selected",
)
def two(folder: Path) -> None:
    plugins = two_plugins()
    with raises(""):
        plugins["zero2"].select()
    accelerator = accelerator_of(deepspeed_plugin=plugins)
    assert accelerator.deepspeed_plugin is plugins["zero2"] and not plugins["zero3"].selected
    accelerator.state.select_deepspeed_plugin("zero3")
    assert accelerator.deepspeed_plugin is plugins["zero3"] and not plugins["zero2"].selected
    assert deepspeed_config()["zero_optimization"]["stage"] == 3
    with raises("", NotImplementedError):
        accelerator_of(deepspeed_plugin=plugin(1))


@case(
    "accelerate",
    "test_train_multiple_models, test_prepare_multiple_models_zero3_inference",
    "two engines of two plugins, in turns",
)
def both_train(folder: Path) -> None:
    plugins = two_plugins()
    first = accelerator_of(deepspeed_plugin=plugins)
    prepared, second = [], Accelerator()
    for name, accelerator in (("zero2", first), ("zero3", second)):
        accelerator.state.select_deepspeed_plugin(name)
        model = build("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        prepared.append((accelerator, *accelerator.prepare(model, optimizer, loader())))
    found: list[list[float]] = [[], []]
    for losses, (accelerator, model, optimizer, batches) in zip(found, prepared, strict=True):
        for batch in itertools.islice(batches, 3):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    close(found[0], found[1], 1e-6)


@case(
    "accelerate", "test_zero3_integration", "a process group that exists before TrainingArguments"
)
def group_first(folder: Path) -> None:
    import deepspeed

    deepspeed.init_distributed()
    args = arguments(
        folder, deepspeed={"zero_optimization": {"stage": 3}, **dict.fromkeys(AUTO[:2], "auto")}
    )
    assert transformers.AutoModel.from_pretrained(saved("gpt2")) is not None and args.deepspeed


# ---- the results ---------------------------------------------------------------------------------


def result_of(case: Case, folder: Path) -> str:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    try:
        case.run(folder, *case.values)
    except Refused as reason:
        return f"refused: {reason}"
    except Exception as error:
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        begin_anew()
    return "passed"


def table(cases: list[Case], results: list[str]) -> list[str]:
    """A row for each test of a library: the number of its variants and their results."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each, result in zip(cases, results, strict=True):
        rows.setdefault((each.library, each.test, each.done), []).append(result)
    lines = ["| library | its test | here | variants | result |", "|---|---|---|---|---|"]
    for (library, test, done), found in rows.items():
        lines.append(
            f"| {library} | `{test}` | {done} | {len(found)} | {'; '.join(dict.fromkeys(found))} |"
        )
    return lines


def main() -> None:
    chosen = [
        each
        for each in CASES
        if all(word in f"{each.library} {each.name}" for word in sys.argv[2:])
    ]
    results = []
    for number, each in enumerate(chosen):
        results.append(result_of(each, FOLDER / str(number)))
        print(each.library, each.name, results[-1], file=sys.stderr, flush=True)
    print("\n".join(table(chosen, results)))


if __name__ == "__main__":
    main()
