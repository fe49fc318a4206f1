"""Do fused experts come by rows, and is training as plain torch's? On one rank, nothing resident.

Every buffer of units is NaN at first, so a row that was not read and is used shows.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from programs.mixtures import (
    FAMILIES,
    NUM_EXPERTS,
    Choices,
    experts_in,
    mixtral,
    qwen3_moe,
    tokens_of,
)
from programs.twins import seeded
from saved_by_hand import flip
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Shards, Tier
from tiermem.run.kv_cache import kv_cache_bytes
from tiermem.swap.base.errors import CorruptionError
from tiermem.units.experts import expected_share
from tiermem.units.unit import divide
from tiermem.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tiermem.weights.backward_marks import in_backward
from tiermem.weights.step_run import StepRun

FEW = 3  # tokens, that choose at most six of sixteen experts
MANY = 60
WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
"""Sizes with experts of many pages."""
ADAM: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}
"""eps is large, so that gradients near zero make small steps."""


def policy(folder: Path, home: Tier = Tier.NVME, **fields: Any) -> OffloadPolicy:
    given = {"params": home, "optim": home, "grads": home, "paths": [folder]}
    return OffloadPolicy(**given | {"persistence_numel": 0} | fields)


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Callable[..., Shards]]:
    """sharded(model, **policy fields): its shards, with NaN in the buffers of units."""
    opened: list[Shards] = []

    def make(model: nn.Module, **fields: Any) -> Shards:
        shards = tiermem.shard(model, policy(tmp_path, **fields), device="cpu")
        opened.append(shards)
        slots: list[Any] = []
        if (pool := shards._pools.units) is not None:
            pool.take_all(slots)
            for slot in slots:
                slot.tensor.fill_(255)
            pool.give_back_all(slots)
        return shards

    yield make
    for shards in opened:
        shards.close()


def train(
    model: Any, optim: torch.optim.Optimizer, length: int, num_steps: int = 3, num_micro: int = 1
) -> list[float]:
    losses = []
    for step in range(num_steps):
        for micro in range(num_micro):
            tokens = tokens_of(step * num_micro + micro, length)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.item())
        optim.step()
        optim.zero_grad()
    return losses


def read_of_units(shards: Shards) -> int:
    """Bytes of units that were read from disk so far."""
    return sum(
        event.num_bytes
        for event in shards.store.recorder.events
        if event.lane == "read" and event.name.startswith("param/")
    )


def fused_bytes(model: nn.Module) -> int:
    return sum(
        param.nbytes
        for module in experts_in(model).values()
        for param in module.parameters()
        if param.dim() > 2
    )


def assert_near(
    shards: Shards, plain: nn.Module, losses: list[float], of_plain: list[float]
) -> None:
    assert losses == pytest.approx(of_plain, abs=1e-6)
    for param, other in zip(shards.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(shards.weight(param), other, rtol=0, atol=1e-6)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("length", [FEW, MANY])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_as_in_plain_torch(
    sharded: Callable[..., Shards], family: str, length: int
) -> None:
    model: Any = seeded(FAMILIES[family])
    plain = copy.deepcopy(model)
    in_memory = copy.deepcopy(model)
    shards = sharded(model)
    losses = train(model, tiermem.AdamW(model.parameters(), **ADAM), length)
    of_plain = train(plain, torch.optim.AdamW(plain.parameters(), **ADAM), length)
    assert_near(shards, plain, losses, of_plain)
    there = sharded(in_memory, home=Tier.HOST)
    of_memory = train(in_memory, tiermem.AdamW(in_memory.parameters(), **ADAM), length)
    assert losses == of_memory
    for param, other in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(shards.weight(param), there.weight(other))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("is_reentrant", [None, False, True])
def test_each_implementation_is_recomputed_with_its_rows(
    sharded: Callable[..., Shards], implementation: str, is_reentrant: bool | None
) -> None:
    model: Any = seeded(qwen3_moe)
    model.set_experts_implementation(implementation)
    plain = copy.deepcopy(model)
    for each in (model, plain) if is_reentrant is not None else ():
        each.train().gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        each.enable_input_require_grads()
    shards = sharded(model)
    losses = train(model, tiermem.AdamW(model.parameters(), **ADAM), FEW, num_micro=2)
    of_plain = train(plain, torch.optim.AdamW(plain.parameters(), **ADAM), FEW, num_micro=2)
    assert_near(shards, plain, losses, of_plain)
    shards.close()
    assert model.config._experts_implementation == implementation


def test_a_backward_reads_its_forwards_rows(sharded: Callable[..., Shards]) -> None:
    """Two forwards before their backwards, of other tokens."""
    model: Any = seeded(mixtral)
    plain = copy.deepcopy(model)
    shards = sharded(model, unit_buffers=2)
    for each in (model, plain):
        losses = [
            each(input_ids=tokens_of(step, FEW), labels=tokens_of(step, FEW)).loss
            for step in range(2)
        ]
        for loss in losses:
            loss.backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        grad = shards.gradient(param)
        assert grad is not None and other.grad is not None
        assert torch.allclose(grad, other.grad, rtol=1e-4, atol=1e-7)


def test_few_tokens_read_few_bytes_in_forward_and_backward(
    sharded: Callable[..., Shards],
) -> None:
    model: Any = seeded(lambda: mixtral(**WIDE))
    choices = Choices(plain := copy.deepcopy(model))
    shards = sharded(model)
    for each in (model, plain):
        each(input_ids=tokens_of(0, FEW), labels=tokens_of(0, FEW)).loss.backward()
    rows = sum(len(choices.used(name)) for name in choices.of)
    row_bytes = fused_bytes(plain) / len(choices.of) / NUM_EXPERTS
    rest = sum(param.nbytes for param in plain.parameters()) - fused_bytes(plain)
    # a unit that stays in its buffer is read once
    assert read_of_units(shards) <= 1.1 * 2 * (rows * row_bytes + rest)
    assert rows <= 2 * FEW * len(choices.of)


def test_experts_that_no_token_used_keep_their_bits(sharded: Callable[..., Shards]) -> None:
    """Torch's gradient of a fused parameter is there as a whole, and zero in rows that no token
    used."""
    model: Any = seeded(mixtral)
    before = copy.deepcopy(model)
    choices = Choices(plain := copy.deepcopy(model))
    sharded(model)
    train(model, tiermem.AdamW(model.parameters(), **ADAM | {"weight_decay": 0.0}), 2)
    optim = torch.optim.AdamW(plain.parameters(), **ADAM | {"weight_decay": 0.0})
    train(plain, optim, 2)
    for name, module in experts_in(model).items():
        unused = sorted(set(range(NUM_EXPERTS)) - choices.used(name))
        assert unused
        old, other = experts_in(before)[name], experts_in(plain)[name]
        for key, param in module.named_parameters():
            master = safe_get_full_fp32_param(param)
            assert master is not None
            assert torch.equal(master[unused], old.get_parameter(key)[unused])
            assert torch.equal(master[unused], other.get_parameter(key)[unused])
            for moment in ("exp_avg", "exp_avg_sq"):
                found = safe_get_full_optimizer_state(param, moment)
                assert found is not None and not found[unused].any()
                assert not optim.state[other.get_parameter(key)][moment][unused].any()


def test_experts_that_were_used_once_go_on_as_in_torch(sharded: Callable[..., Shards]) -> None:
    """Their moments decay and their weights follow, since torch's gradient is zero, not None."""
    model: Any = seeded(mixtral)
    plain = copy.deepcopy(model)
    shards = sharded(model)
    losses = train(model, tiermem.AdamW(model.parameters(), **ADAM), 2, num_steps=6)
    of_plain = train(plain, torch.optim.AdamW(plain.parameters(), **ADAM), 2, num_steps=6)
    assert_near(shards, plain, losses, of_plain)


def kernel_read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_reads_the_rows_in_use(sharded: Callable[..., Shards], family: str) -> None:
    """By the kernel's count. All that is not experts is resident, so the rows are all that is
    read."""
    model: Any = seeded(lambda: FAMILIES[family](num_hidden_layers=6, **WIDE)).eval()
    choices = Choices(plain := copy.deepcopy(model))
    sharded(model, persistence_numel=1 << 17, unit_buffers=2)
    row_bytes = fused_bytes(plain) / len(choices.of) / NUM_EXPERTS
    with torch.no_grad():
        found = model(tokens_of(0, MANY), use_cache=True)
        of_plain = plain(tokens_of(0, MANY), use_cache=True)
        for _ in range(3):
            token = of_plain.logits[:, -1:].argmax(-1)
            for each in choices.of.values():
                each.clear()
            before = kernel_read_bytes()
            found = model(token, past_key_values=found.past_key_values, use_cache=True)
            num_bytes = kernel_read_bytes() - before
            of_plain = plain(token, past_key_values=of_plain.past_key_values, use_cache=True)
            rows = sum(len(choices.used(name)) for name in choices.of)
            assert num_bytes <= 1.1 * rows * row_bytes
            assert num_bytes >= 0.9 * rows * row_bytes
            assert torch.equal(found.logits, of_plain.logits)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_generated_as_in_plain_torch(sharded: Callable[..., Shards], family: str) -> None:
    model: Any = seeded(FAMILIES[family]).eval()
    plain: Any = copy.deepcopy(model)
    sharded(model, kv_bytes=kv_cache_bytes(model.config, 2, 24))
    tokens = torch.cat([tokens_of(0, 9), tokens_of(1, 9)])
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(tokens, **given), plain.generate(tokens, **given))


def test_other_code_reads_every_row(sharded: Callable[..., Shards]) -> None:
    """A hook of the user reads a parameter of which only some rows were fetched."""
    model: Any = seeded(mixtral)
    experts = next(iter(experts_in(model).values()))
    expected = experts.get_parameter("down_proj").detach().clone()
    sharded(model)
    seen: list[torch.Tensor] = []
    experts.register_forward_hook(lambda module, *_: seen.append(module.down_proj.clone()))
    with torch.no_grad():
        model(tokens_of(0, FEW))
    assert torch.equal(seen[0], expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_under_step", [False, True])
def test_other_code_gets_gradients_of_every_row(
    sharded: Callable[..., Shards], is_under_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under a step, when a unit comes whole, and its backward's fetch might leave rows out."""
    if is_under_step:  # of which no test can be sure that it lasts
        monkeypatch.setattr(StepRun, "is_under_way", property(lambda _: not in_backward()))
    model: Any = seeded(mixtral)
    plain = copy.deepcopy(model)
    shards = sharded(model, unit_buffers=2)
    for each in (model, plain):
        for module in experts_in(each).values():
            module.register_forward_hook(
                lambda module, _, output: output * (1 + module.down_proj.square().mean())
            )
    losses = train(model, tiermem.AdamW(model.parameters(), **ADAM), FEW)
    of_plain = train(plain, torch.optim.AdamW(plain.parameters(), **ADAM), FEW)
    assert_near(shards, plain, losses, of_plain)


def test_a_write_to_experts_in_forward_is_refused(sharded: Callable[..., Shards]) -> None:
    model: Any = seeded(mixtral)
    experts = next(iter(experts_in(model).values()))
    sharded(model)

    def scale(module: Any, *_: Any) -> None:
        module.down_proj.mul_(2)

    experts.register_forward_hook(scale)
    with torch.no_grad(), pytest.raises(RuntimeError, match="GatheredParameters"):
        model(tokens_of(0, FEW))


@pytest.mark.parametrize("adapted", ["attention", "experts"])
def test_adapters_are_trained_as_in_plain_torch(
    sharded: Callable[..., Shards], adapted: str
) -> None:
    peft = pytest.importorskip("peft")
    targets = {
        "attention": {"target_modules": ["q_proj", "v_proj"]},
        "experts": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    }
    model: Any = peft.get_peft_model(
        seeded(lambda: qwen3_moe(**WIDE)),
        peft.LoraConfig(r=4, init_lora_weights=False, **targets[adapted]),
    )
    plain = copy.deepcopy(model)
    shards = sharded(model)
    losses = train(model, tiermem.AdamW(model.parameters(), **ADAM), FEW)
    of_plain = train(plain, torch.optim.AdamW(plain.parameters(), **ADAM), FEW)
    assert_near(shards, plain, losses, of_plain)
    half_bytes = 3 * 2 * fused_bytes(plain) / 2
    read = read_of_units(shards)
    # PEFT computes with the whole of a parameter that it adapts
    assert read < half_bytes if adapted == "attention" else read > half_bytes


def test_a_flipped_bit_of_a_row_is_named(sharded: Callable[..., Shards], tmp_path: Path) -> None:
    model: Any = seeded(mixtral).eval()
    choices = Choices(plain := copy.deepcopy(model))
    with torch.no_grad():
        plain(tokens_of(0, 1))
    shards = sharded(model)
    name, used = next((name, calls[0]) for name, calls in choices.of.items())
    row = experts_in(plain)[name].get_parameter("gate_up_proj")[max(used)]
    data = row.detach().numpy().tobytes()
    (file,) = tmp_path.glob("tiermem-*/segment.bin")
    flip(file, file.read_bytes().index(data) + 4321)
    with torch.no_grad(), pytest.raises(CorruptionError, match="gate_up_proj"):
        model(tokens_of(0, 1))
    shards.close()


def test_several_ranks_fetch_whole_units(tmp_path: Path) -> None:
    model = mixtral()
    given = policy(tmp_path)
    rows = {
        num: {shard.num_rows for unit in divide(model, given, num).units for shard in unit.shards}
        for num in (1, 2)
    }
    assert rows == {1: {0, NUM_EXPERTS}, 2: {0}}


def test_the_share_of_experts_is_that_of_chance() -> None:
    assert expected_share(1, 8, 128) == pytest.approx(8 / 128)
    generator = torch.Generator().manual_seed(0)
    tries = [
        len(set(torch.rand(20, 128, generator=generator).topk(8).indices.flatten().tolist()))
        for _ in range(200)
    ]
    assert expected_share(20, 8, 128) == pytest.approx(sum(tries) / 200 / 128, rel=0.02)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/30b_a3b.md, with a tiny model."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    model: Any = seeded(lambda: qwen3_moe(**WIDE))
    model.save_pretrained("Qwen3-30B-A3B")
    page = Path(__file__).parent.parent.parent / "docs" / "30b_a3b.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"batches": [tokens_of(0, MANY)] * 3}
    exec(compile(block, str(page), "exec"), names)  # the page's own code
    assert names["loss"].isfinite()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [3, 60])
def test_experts_that_are_called_directly_have_their_gradients(
    sharded: Callable[..., tiermem.Shards], length: int
) -> None:
    """No hook runs around `forward` itself, and another forward evicts the unit before backward."""
    model: Any = seeded(lambda: mixtral(**WIDE)).eval()
    plain = copy.deepcopy(model)
    sharded(model, unit_buffers=3)
    model(tokens_of(0, length))
    found = []
    for each in (plain, model):
        inputs = []
        total = torch.zeros(())
        for experts in experts_in(each).values():
            x = torch.randn(2, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
            inputs.append(x)
            chosen = torch.tensor([[3, 9], [5, 2]])
            total = total + experts.forward(x, chosen, torch.full((2, 2), 0.5)).square().sum()
        with torch.no_grad():
            each(tokens_of(7, length))
        total.backward()
        found.append([x.grad for x in inputs])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_the_page_has_what_plan_says(tmp_path: Path) -> None:
    """docs/30b_a3b.md: its first command, of the published shape."""
    pytest.importorskip("peft")
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    sizes |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    sizes |= {"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "head_dim": 128}
    shape = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **sizes}
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape), "utf-8")
    page = (Path(__file__).parents[2] / "docs" / "30b_a3b.md").read_text("utf-8")
    block = re.search(r"```sh\n# the base in RAM\n(tiermem plan .*?)\n#", page, re.DOTALL)
    assert block is not None
    words = shlex.split(block[1].replace("\\\n", " "))[1:]
    tiermem_itself = Path(sys.executable).with_name("tiermem")
    said = subprocess.run([tiermem_itself, *words], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    speed = re.search(r"it fits: ([\d,.]+) tokens/s", said.stdout)
    most = re.search(r"= DEVICE +DEVICE +([\d.]+) GiB", said.stdout)
    memory = re.search(r"= HOST +HOST +([\d.]+) GiB", said.stdout)
    assert speed and most and memory
    found = f"{float(most[1]):.1f} GiB of the card, {float(memory[1]):.0f} GiB of RAM"
    found += f", {float(speed[1].replace(',', '')):,.0f} tokens/s"
    [row] = [line for line in page.splitlines() if line.startswith("| a 12 GB card")]
    assert found in row
