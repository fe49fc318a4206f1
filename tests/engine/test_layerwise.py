"""Does accumulation by layers give the bits of accumulation by batches, and read weights twice a
step whatever its length?"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from launch import launch
from layerwise_runs import LAYERS, Run, cross_entropy, engine_of, micro_batches, train
from programs import models
from programs.models import VOCAB
from programs.twins import assert_same_tensors, batch, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy
from tiermem.run.chain import NoChainError
from tiermem.run.hooks import Hooks
from tiermem.swap.program.program import Program

SCRIPT = Path(__file__).parent / "layerwise_on_ranks.py"


class Case(NamedTuple):
    build: Callable[[], nn.Module] = models.ShortTower
    num_micro: int = 2
    device: str = "nvme"
    keys: dict[str, Any] | None = None
    own: dict[str, Any] | None = None


CASES = {
    "one micro-batch": Case(num_micro=1),
    "two micro-batches": Case(),
    "four, in host memory": Case(num_micro=4, device="cpu"),
    "tied weights": Case(models.tied_tower, 4),
    "frozen parameters": Case(models.frozen_tower),
    "a root with parameters and two embeddings": Case(models.NanoGPT),
    "blocks checkpointed by the model": Case(lambda: models.ShortTower(checkpoint=False)),
    "blocks that are split": Case(
        keys={"zero_optimization": {"offload_param": {"buffer_size": 3200}}}
    ),
    "bf16, gradients in fp32": Case(
        keys={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "fp16 whose scale overflows": Case(
        keys={"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}}
    ),
    "autocast": Case(keys={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "compact states": Case(keys={"bf16": {"enabled": True}}, own={"precision": "compact"}),
    "a Llama, its loss in its output": Case(functools.partial(models.llama, use_cache=False)),
    "a Llama that checkpoints": Case(functools.partial(models.checkpointed_llama, False), 3),
    "a Llama that checkpoints, reentrant": Case(functools.partial(models.checkpointed_llama, True)),
    "a GPT-2, activations on NVMe": Case(lambda: gpt2(), own={"activations": "nvme"}),
    "experts by rows": Case(lambda: mixture(), 3),
    "a Sequential": Case(
        lambda: nn.Sequential(
            nn.Embedding(VOCAB, 16), *(nn.Linear(16, 16) for _ in range(3)), Head()
        )
    ),
}


def mixture() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 64, "num_experts_per_tok": 1}
    given = sizes | heads | experts
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, use_cache=False, **given))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # block inputs of 64 KiB and more move
    sizes = {"n_embd": 1024, "n_layer": 3, "n_head": 4, "n_inner": 64}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, use_cache=False, **sizes, **no_dropout))


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, VOCAB)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_layers_give_the_bits_of_batches(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = seeded(case.build)
    runs = [
        train(
            copy.deepcopy(model), order, case.num_micro, case.device, tmp_path, case.keys, case.own
        )
        for order in ("batches", "layers")
    ]
    assert_same_runs(*runs)
    assert (0 < runs[0].num_skipped < len(runs[0].losses)) == ("overflows" in name)


def assert_same_runs(mine: Run, expected: Run) -> None:
    assert mine.losses == expected.losses
    assert str(mine.norms) == str(expected.norms)  # also NaN
    assert_same_tensors(mine.weights, expected.weights)
    assert_same_tensors(mine.states, expected.states)


def test_two_ranks_give_the_bits_of_batches(tmp_path: Path) -> None:
    out, nvme = tmp_path / "out", tmp_path / "nvme"
    out.mkdir()
    nvme.mkdir()
    for found in launch(SCRIPT, 2, out, str(nvme)):
        for name, (batches, layers) in found.items():
            assert batches.losses == layers.losses, name
            assert batches.norms == layers.norms, name
            assert_same_tensors(batches.weights, layers.weights)


def test_dropout_draws_the_same_numbers_on_every_tier_and_those_of_batches_for_one(
    tmp_path: Path,
) -> None:
    model = seeded(Dropping)

    def run(order: str, num_micro: int, device: str) -> Run:
        torch.manual_seed(1)
        return train(copy.deepcopy(model), order, num_micro, device, tmp_path)

    assert run("layers", 1, "nvme").losses == run("batches", 1, "cpu").losses
    assert run("layers", 3, "nvme").losses == run("layers", 3, "cpu").losses


class Dropping(models.ShortTower):
    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(tokens))

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.drop = nn.Dropout(0.3)
        self.layers = nn.ModuleList(
            [nn.Sequential(models.Block(31, 97), nn.Dropout(0.3)) for _ in range(3)]
        )


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_are_read_twice_and_gradients_written_once(tmp_path: Path) -> None:
    """The tolerance is what is read ahead at both ends of a step, and the embedding, which the
    tail's forward reads again.

    Reading weights once more would cost 14 units. What is read ahead depends on the time that reads
    take; no step goes on under a forward, as what that one reads depends on the time that writes
    take.
    """
    model = seeded(lambda: models.ShortTower(num_blocks=12))
    once, two, six, batches = (
        train(
            copy.deepcopy(model), order, num, "nvme", tmp_path, None, {"overlap": "none"}
        ).of_last_step
        for order, num in (("batches", 1), ("layers", 2), ("layers", 6), ("batches", 2))
    )
    tolerance, weights = 9 * six.largest_unit, 14 * six.largest_unit
    assert two.written == six.written == once.written
    assert abs(two.read - once.read) <= tolerance
    assert abs(six.read - once.read) <= tolerance
    # what each further micro-batch writes otherwise
    assert batches.written - once.written > 0.8 * weights
    assert batches.read - once.read > 2 * weights


# ---- beside the step -----------------------------------------------------------------------------


def steps_of(model: nn.Module, overlap: str, grads: str, folder: Path) -> Run:
    keys, own = (
        {"gradient_clipping": 0.0, "bf16": {"enabled": True}},
        {"overlap": overlap, "grads": grads},
    )
    return train(copy.deepcopy(model), "layers", 3, "nvme", folder, keys, own)


def test_a_step_goes_on_under_the_forward_of_all_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step makes states, and ends before the next forward; `train` ends the third."""
    model = seeded(models.ShortTower)
    expected, under_way = steps_of(model, "none", "nvme", tmp_path), list[bool]()
    begin = Hooks.begin_backward

    def noted(hooks: Hooks) -> None:
        under_way.append(hooks._steps.is_under_way)
        begin(hooks)
        assert not hooks._steps.is_under_way

    monkeypatch.setattr(Hooks, "begin_backward", noted)
    assert_same_runs(steps_of(model, "forward", "nvme", tmp_path), expected)
    assert under_way == [False, False, True, False]


@pytest.mark.slow
def test_units_are_stepped_when_the_last_micro_batch_has_passed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third step on: the first makes states, the second finds what was assumed. Each tile
    is attempted once.

    Gradients on NVMe may be on their way there when backward ends; the step then takes their tiles.
    """
    model = seeded(models.ShortTower)
    expected, log = steps_of(model, "none", "nvme", tmp_path), list[str]()
    attempt, commit = Program.attempt, Program.commit

    def attempting(program: Program[Any], tiles: Sequence[Any], *args: Any) -> Any:
        log.extend(tile.entry for tile in tiles)
        return attempt(program, tiles, *args)

    def committing(program: Program[Any], *args: Any) -> None:
        log.append("commit")
        commit(program, *args)

    monkeypatch.setattr(Program, "attempt", attempting)
    monkeypatch.setattr(Program, "commit", committing)
    assert_same_runs(steps_of(model, "backward", "cpu", tmp_path), expected)
    assert_same_runs(steps_of(model, "backward", "nvme", tmp_path), expected)
    assert log.count("commit") == 4
    half = log[: log.index("commit") + 1]
    assert log[: 2 * len(half)] == half + half
    assert half[-1] == "commit" and len(set(half)) == len(half) > 4


def test_an_exception_in_a_forward_leaves_the_step_under_it_whole(tmp_path: Path) -> None:
    model, own = seeded(models.ShortTower), {"overlap": "forward"}
    expected = train(copy.deepcopy(model), "layers", 2, "nvme", tmp_path, None, own)

    def fail(*args: Any) -> None:
        assert engine.shards.steps.is_under_way
        raise ZeroDivisionError("in a forward")

    with engine_of(model, "layers", 2, "nvme", tmp_path, None, own) as engine:
        losses = []
        for step in range(len(expected.losses)):
            if step > 1:
                handle = engine.module.layers[1].register_forward_pre_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    engine.train_batch(micro_batches(9, 2), cross_entropy)
                handle.remove()
            losses.append(float(engine.train_batch(micro_batches(step, 2), cross_entropy)))
        assert losses == expected.losses
        assert_same_tensors(engine.module_state_dict(), expected.weights)


# ---- exceptions, saves, refusals -----------------------------------------------------------------


def test_an_exception_in_one_micro_batch_forgets_the_step(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    expected = train(copy.deepcopy(model), "layers", 3, "nvme", tmp_path)

    def failing(place: int) -> Callable[..., torch.Tensor]:
        calls = iter(range(100))

        def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:
            loss = cross_entropy(output, labels)
            if next(calls) == place:
                loss.register_hook(fail)
            return loss

        def fail(grad: torch.Tensor) -> None:
            raise ZeroDivisionError("in backward")

        return loss_of

    with engine_of(model, "layers", 3, "nvme", tmp_path) as engine:
        for place in (1, 2):  # the first call is the one that finds the chain
            with pytest.raises(ZeroDivisionError):
                engine.train_batch(micro_batches(0, 3), failing(place))
            assert all(param.grad is None for param in engine.module.parameters())
        with pytest.raises(ValueError, match="only 2 are left"):
            engine.train_batch(micro_batches(0, 3)[:2], cross_entropy)
        with pytest.raises(StopIteration):
            engine.train_batch([], cross_entropy)
        losses = [
            float(engine.train_batch(micro_batches(step, 3), cross_entropy))
            for step in range(len(expected.losses))
        ]
        assert losses == expected.losses
        assert_same_tensors(engine.module_state_dict(), expected.weights)


def test_a_run_that_is_saved_and_resumed_goes_on_to_the_bit(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    expected = train(copy.deepcopy(model), "layers", 2, "nvme", tmp_path)
    half = len(expected.losses) // 2
    with engine_of(copy.deepcopy(model), "layers", 2, "nvme", tmp_path) as engine:
        for step in range(half):
            engine.train_batch(micro_batches(step, 2), cross_entropy)
        with torch.no_grad():
            engine(batch(0)[0])  # an evaluation between steps
        engine.save_checkpoint(tmp_path / "saved")
    with engine_of(seeded(models.ShortTower, 1), "layers", 2, "nvme", tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.micro_steps == 2 * half
        rest = range(half, len(expected.losses))
        losses = [float(engine.train_batch(micro_batches(step, 2), cross_entropy)) for step in rest]
        assert losses == expected.losses[half:]
        assert_same_tensors(engine.module_state_dict(), expected.weights)


class Residual(models.ShortTower):
    """Adds each block's input to its output, outside the block."""

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + layer(x)


class Deep(models.ShortTower):
    """Its loss sees the output of the first block, too."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.layers[0](self.embed(tokens))
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x + first)


class Collecting(models.Block):
    """Keeps a loss on itself, as a router does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.extra = y.mean()
        return y


class Changing(models.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


class Gating(models.ShortTower):
    """Blocks take what is positive of the output before, which has no gradient and no NaN."""

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x, x.mean(-1, keepdim=True) > 0)


class Gated(models.Block):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * gate


class Looking(models.ShortTower):
    """Leaves later blocks out where a mean of the output before is large."""

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if x.mean() > 1e9 else super().through(layer, x)


class Counting(models.ShortTower):
    """Counts its forwards."""

    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.seen += 1
        return super().forward(tokens)


class Replacing(Counting):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen.detach()
        return models.ShortTower.forward(self, tokens)


class Normed(models.Block):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.statistics = nn.InstanceNorm1d(sizes[0], track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.statistics(super().forward(x).transpose(1, 2)).transpose(1, 2)


def tower_of(block: type[nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = models.ShortTower()
        model.layers = nn.ModuleList([block(31, 97) for _ in range(3)])
        return model

    return build


REFUSED = {
    "used twice": (
        lambda: models.ShortTower(rounds=2),
        "layers.0 is called 2 times in one forward",
    ),
    "changed between blocks": (
        Residual,
        "layers.1 takes no tensors of the output of the block before",
    ),
    "another way in the next forward": (
        lambda: models.ShortTower(skips=True),
        "a forward called layers.. where others called",
    ),
    "output in an object": (
        lambda: models.ShortTower(outputs="dataclass"),
        "takes no tensors of the output of the block before",
    ),
    "reentrant checkpointing": (
        lambda: models.ShortTower(checkpoint=True),
        "called without gradients, as reentrant checkpointing",
    ),
    "a loss of an earlier output": (
        Deep,
        "the loss depends on the output of layers.0 in another way",
    ),
    "a gate made of an output": (
        lambda: Gating(block=Gated),
        "made of the output of a block before, not that output as it is",
    ),
    "a look at an output": (Looking, "looks at a value of a block's output"),
    "a loss kept on a block": (
        tower_of(Collecting),
        "layers.2.extra is made by the block and would lose its gradient",
    ),
    "arguments changed in place": (tower_of(Changing), "layers.0 changes its arguments"),
    "a buffer that is counted up": (
        Counting,
        "a forward changes the buffer seen, and parts of a forward run twice",
    ),
    "a buffer that is replaced": (Replacing, "a forward changes the buffer seen"),
    "running statistics": (tower_of(Normed), "changes the buffer layers.0.statistics.running_mean"),
    "a cache": (
        models.llama,
        r"model.layers.0 changes its arguments.*give it no cache \(use_cache=False\)",
    ),
    "no list": (
        lambda: nn.Embedding(VOCAB, VOCAB),
        "this Embedding has no ModuleList or Sequential",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_chain_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    build, reason = REFUSED[name]
    with engine_of(seeded(build), "layers", 2, "cpu", tmp_path) as engine:
        engine.train()
        before = engine.module_state_dict()
        with pytest.raises(NoChainError, match=reason) as told:
            engine.train_batch(micro_batches(0, 2), cross_entropy)
        assert 'set accumulation to "batches"' in str(told.value)
        assert engine.global_steps == 0
        assert_same_tensors(engine.module_state_dict(), before)
        assert all(param.grad is None for param in engine.module.parameters())


def test_a_buffer_that_changes_in_a_later_step_is_refused(tmp_path: Path) -> None:
    model = seeded(Counting)
    model.counts = False
    with engine_of(model, "layers", 2, "cpu", tmp_path) as engine:
        engine.train_batch(micro_batches(0, 2), cross_entropy)
        model.counts = True
        with pytest.raises(NoChainError, match="a forward changes the buffer seen"):
            engine.train_batch(micro_batches(1, 2), cross_entropy)
        assert engine.global_steps == 1


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tiermem.Engine]:
    with engine_of(seeded(models.ShortTower), "layers", 2, "cpu", tmp_path) as each:
        yield each


def test_other_ways_to_train_are_refused(engine: tiermem.Engine) -> None:
    with pytest.raises(RuntimeError, match=r"call engine\.train_batch\(micro_batches\)"):
        engine.backward(cross_entropy(engine(batch(0)[0]), batch(0)[1]))
    with pytest.raises(RuntimeError, match="outside no_sync"), engine.no_sync():
        engine.train_batch(micro_batches(0, 2), cross_entropy)
    with pytest.raises(
        ValueError,
        match=r"the engine's and TiermemTrainer's, which see all micro-batches of a step",
    ):
        tiermem.shard(seeded(models.ShortTower), OffloadPolicy(accumulation=LAYERS))


def test_a_stage_or_a_setting_that_has_no_use_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match="accumulation=layers with stage 2"):
        OffloadPolicy(stage=2, accumulation=LAYERS)
    with pytest.raises(ValueError, match='accumulation="layers" with step_in_backward'):
        OffloadPolicy(step_in_backward=True, accumulation=LAYERS)


def test_an_output_without_a_loss_is_refused(engine: tiermem.Engine) -> None:
    with pytest.raises(
        TypeError, match="a Tensor, has no loss of one element: give train_batch a loss_fn"
    ):
        engine.train_batch([tokens for tokens, _ in micro_batches(0, 2)])
