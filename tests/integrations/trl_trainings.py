"""The same script with TRL's SFT, DPO and GRPO trainers and with the mixin before them; on one
rank, or launched on several.

trl_trainings.py FOLDER WORK KIND...     every rank writes {kind: (log of the plain run, log of the sharded run)}
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ["CI"] = "true"  # trl reports its use otherwise

import datasets
import torch
import torch.distributed as dist
from tiny_models import VOCAB, build
from tokenizers import Tokenizer, models, pre_tokenizers
from trainings import Log, TiermemTrainer, arguments, closing, log_of, on_nvme
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


class ShardedSFT(TiermemTrainer.mixin, SFTTrainer):
    """SFTTrainer with the argument `tiermem`."""


class ShardedDPO(TiermemTrainer.mixin, DPOTrainer):
    """DPOTrainer with the argument `tiermem`."""


class ShardedGRPO(TiermemTrainer.mixin, GRPOTrainer):
    """GRPOTrainer with the argument `tiermem`."""


def num_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward: how many tokens of a completion are even."""
    return [float(sum(each % 2 == 0 for each in ids)) for ids in completion_ids]


class Kind(NamedTuple):
    """A trainer of TRL."""

    plain: Any
    sharded: Any
    config: Any
    columns: dict[str, int]  # of the data: how many words a text has
    settings: dict[str, Any]
    given: dict[str, Any]  # to the trainer


KINDS = {
    "sft": Kind(SFTTrainer, ShardedSFT, SFTConfig, {"text": 9}, {"max_length": 16}, {}),
    "dpo": Kind(
        DPOTrainer,
        ShardedDPO,
        DPOConfig,
        {"prompt": 3, "chosen": 5, "rejected": 5},
        {"max_length": 16},
        {},
    ),
    "grpo": Kind(
        GRPOTrainer,
        ShardedGRPO,
        GRPOConfig,
        {"prompt": 3},
        {"num_generations": 2, "max_completion_length": 5, "beta": 0.1},
        {"reward_funcs": num_even},
    ),
}
_TAKEN = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "max_grad_norm",
          "logging_steps", "save_strategy", "save_steps", "use_cpu", "report_to", "disable_tqdm", "seed")  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of numbered words."""
    words = {"<pad>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, VOCAB)}}
    own = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
    )


def rows(columns: dict[str, int]) -> datasets.Dataset:
    """24 rows with a text of about so many words in each column."""

    def text(seed: int, length: int) -> str:
        numbers = torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
        return " ".join(f"w{number}" for number in numbers.tolist())

    table = [
        {
            name: text(100 * row + place, length + row % 3)
            for place, (name, length) in enumerate(columns.items())
        }
        for row in range(24)
    ]
    return datasets.Dataset.from_list(table)


def saved(model: str, folder: Path) -> Path:
    """The folder of a saved model; each rank has its own."""
    path = folder / f"saved-{os.environ.get('RANK', 0)}"
    if not path.is_dir():
        build(model).save_pretrained(path)
    return path


def train(
    kind: str, trainer: Any, model: Path, folder: Path, resume: str | None = None, **own: Any
) -> Log:
    """Six steps in fp32 (TRL's default is bf16), with a checkpoint after the third."""
    _, _, config, columns, settings, given = KINDS[kind]
    asked = arguments(folder, max_steps=6, save_strategy="steps", save_steps=3).to_dict()
    args = config(
        output_dir=str(folder), bf16=False, **{key: asked[key] for key in _TAKEN}, **settings
    )
    opened = AutoModelForCausalLM.from_pretrained(model)
    made = trainer(
        opened, args=args, train_dataset=rows(columns), processing_class=tokenizer(), **given, **own
    )
    with closing(made):
        made.train(resume_from_checkpoint=resume)
        return log_of(made)


def main() -> None:
    out, work, *kinds = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    found, model = {}, saved("llama", work)
    for kind in kinds:
        plain = train(kind, KINDS[kind].plain, model, work / kind / "plain")
        ours = train(
            kind, KINDS[kind].sharded, model, work / kind / "ours", tiermem=on_nvme(work / "nvme")
        )
        found[kind] = plain, ours
    torch.save(found, out / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
