"""Does every key of the config do what docs/keys.md says of it?

    honoured, planned   changes the fields of the policy that its claim names and no other; a test sees a run change
    computed            any value is taken, the policy stays as it is, and the report says what happens instead
    refused             test_refused_keys.py
    deprecated          test_config_load.py, and its successor's claim

A key without a claim fails here: write the test that flips it, and name that test in key_claims.py.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_keys import Key, catalogue, every_model
from key_claims import CLAIMS

from tiermem.config import TiermemConfig, load_config
from tiermem.config.own import OwnConfig
from tiermem.config.zero import ZeroConfig
from tiermem.keys import PLANNED
from tiermem.policy import OffloadPolicy
from tiermem.section import SET_BY, ConfigModel

ROOT = Path(__file__).parents[2]

COMPUTED_VALUES: dict[str, Any] = {
    "tiermem.measured": {"date": "today"},
    "activation_checkpointing.number_checkpoints": 4,
    "checkpoint.parallel_write": {"pipeline_stage": True},
    "checkpoint.writer": {"type": "FAST"},
    "optimizer.params.ns_method": "standard",
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization.overlap_comm": False,
}  # of keys that are not switches


def beside_computed(path: str) -> dict[str, Any]:
    """A config in which a computed key may stand."""
    name = "Muon" if path == "optimizer.params.ns_method" else "Adam"
    return {"optimizer": {"type": name}, "zero_optimization": {"stage": 3}}


def leaves() -> Iterator[Key]:
    """Every key that holds a value, not a section of keys; one row for keys that several optimizers
    share."""
    sections = {model.section for model in every_model()} - {"tiermem.paths", "tiermem.precision"}
    seen = set()
    for section in catalogue():
        for key in section.keys:
            is_section = key.path in sections and key.path != "scheduler.params"
            if (
                key.fate in ("honoured", "planned", "computed", "deprecated")
                and not is_section
                and key.path not in seen
            ):
                if section.title.startswith("scheduler.params of"):
                    continue  # tests/engine/test_schedule.py: every argument of every schedule
                seen.add(key.path)
                yield key


KEYS = {key.path: key for key in leaves()}
HONOURED = [path for path, key in KEYS.items() if key.fate in ("honoured", "planned")]


def test_every_honoured_key_has_a_claim() -> None:
    unclaimed = [path for path in HONOURED if path not in CLAIMS]
    assert not unclaimed, f"flip {unclaimed} in a test and name it in tests/config/key_claims.py"


def test_no_claim_is_about_a_key_that_is_not_honoured() -> None:
    assert set(CLAIMS) <= set(HONOURED)


@pytest.mark.parametrize("path", CLAIMS)
def test_a_key_changes_the_fields_of_the_policy_that_it_claims(path: str) -> None:
    claim = CLAIMS[path]
    if path.startswith("tiermem.paths."):
        pytest.skip("a key of one path, not of the config: tests/config/test_config_paths.py")
    before, after = (
        load_config(config).policy()
        for config in (claim.beside, with_key(claim.beside, path, claim.value))
    )
    changed = {name: value for name, value in vars(after).items() if value != getattr(before, name)}
    assert changed == dict(claim.policy)


@pytest.mark.parametrize("path", CLAIMS)
def test_the_test_that_sees_a_key_exists_and_speaks_of_it(path: str) -> None:
    claim = CLAIMS[path]
    file, _, name = claim.seen_by.partition("::")
    assert name in names_of(file), f"{file} has no {name}"
    words = {path.rpartition(".")[2], *KEYS[path].spellings, *claim.policy}
    text = text_of(file)
    assert any(word in text for word in words), f"{file} speaks of none of {sorted(words)}"


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.fate == "computed"])
def test_a_computed_key_takes_any_value_changes_nothing_and_says_what_happens(path: str) -> None:
    value = COMPUTED_VALUES.get(path, KEYS[path].default != "true")
    beside = beside_computed(path)
    before = load_config(beside)
    after = load_config(with_key(beside, path, value))
    assert after.policy() == before.policy()
    (row,) = (row for row in after.report() if row.key == path)
    assert (row.value, row.how, row.note) == (value, "computed", KEYS[path].note)


def test_the_documented_default_of_an_honoured_key_is_the_one_that_acts() -> None:
    """A key that is not given sets no field, so the policy's default acts; planned keys are
    computed instead."""
    acts = OffloadPolicy()
    compared = 0
    for model in (ZeroConfig, TiermemConfig, OwnConfig):
        for name, field in model.model_fields.items():
            key = model.path_of(name)
            # the documents' stage 0 is the policy's 3
            if key not in SET_BY or key in PLANNED or name == "stage":
                continue
            documented = field.get_default(call_default_factory=True)
            setting = SET_BY[key]
            is_section = isinstance(documented, ConfigModel)
            if not is_section and documented not in (None, setting.key.off):
                assert documented == getattr(acts, setting.field), key
                compared += 1
    assert compared >= 8


def test_every_deprecated_key_warns_and_names_its_successor() -> None:
    deprecated = [path for path, key in KEYS.items() if key.fate == "deprecated"]
    assert len(deprecated) == 4
    for path in deprecated:
        with pytest.warns(DeprecationWarning, match=path) as caught:
            load_config(with_key({"zero_optimization": {"stage": 3}}, path, True))
        assert any("use " in str(each.message) for each in caught)


# ---- misspelt keys -------------------------------------------------------------------------------


def misspelt(key: str) -> str:
    """The key without a letter of its middle."""
    middle = len(key) // 2
    return key[:middle] + key[middle + 1 :]


@pytest.mark.parametrize("path", [path for path in KEYS if not path.startswith("tiermem.paths.")])
def test_a_misspelt_key_names_the_nearest_in_its_section(path: str) -> None:
    section, _, key = path.rpartition(".")
    beside = CLAIMS[path].beside if path in CLAIMS else beside_computed(path)
    wrong = f"{section}.{misspelt(key)}" if section else misspelt(key)
    if section == "scheduler" or path == "optimizer.type":
        beside = {section: {"type": "AdamW" if section == "optimizer" else "WarmupLR"}}
    with pytest.raises(ValueError, match="unknown key") as caught:
        load_config(with_key(beside, wrong, 1))
    assert f"{wrong}: " in str(caught.value)
    assert f"did you mean {path}?" in str(caught.value)


def with_key(config: Any, path: str, value: Any) -> dict[str, Any]:
    """The config with one more key."""
    made: dict[str, Any] = copy.deepcopy(dict(config))
    *sections, key = path.split(".")
    inner = made
    for section in sections:
        inner = inner.setdefault(section, {})
    if path in ("optimizer.type", "scheduler.type"):
        inner.clear()
    inner[key] = value
    return made


@functools.cache
def text_of(file: str) -> str:
    """A test file, with what it runs or imports from beside it."""
    text = (ROOT / file).read_text(encoding="utf-8")
    near = (ROOT / file).parent.glob("*.py")
    beside = [
        each for each in near if f'"{each.name}"' in text or f"from {each.stem} import" in text
    ]
    return text + "".join(each.read_text(encoding="utf-8") for each in beside)


@functools.cache
def names_of(file: str) -> set[str]:
    """The names of a file's test functions."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_model_of_the_config_is_in_the_catalogue() -> None:
    """A section that somebody adds shows up on the page."""
    shown = set(every_model())
    reached: set[type[ConfigModel]] = set()
    waiting: list[type[ConfigModel]] = [TiermemConfig]
    while waiting:
        model = waiting.pop()
        reached.add(model)
        waiting += [each for each in models_in(model) if each not in reached]
    assert reached == shown


def models_in(model: type[ConfigModel]) -> Iterator[type[ConfigModel]]:
    for field in model.model_fields.values():
        yield from models_of(field.annotation)


def models_of(annotation: Any) -> Iterator[type[ConfigModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from models_of(inner)
