"""The page of keys, docs/keys.md, made from the catalogue:

    python -m tiermem.config.page > docs/keys.md

A test makes it again and compares. The text of a row is the field's docstring and what `keys.py` says; here are only the
words around the tables, and where the sources that define a key disagree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from tiermem.config.catalogue import Key, Section, catalogue

__all__ = ["DISAGREEMENTS", "page"]

_HEAD = """\
<!-- Made by `python -m tiermem.config.page > docs/keys.md`. Do not edit: change the docstrings in tiermem/config. -->

# Keys of a config

Every key that a DeepSpeed-style config may hold, with its default and what becomes of it here. No key is read and then
forgotten. The column "here" says which of these it is:

| here | meaning |
|---|---|
| honoured | acts as it is set, or as its default says |
| planned | acts as it is set; when it is not set, the plan computes the value instead of taking the documented default |
| computed | any value is accepted and none changes the result: the design decides, and the note says what happens |
| inert | accepted with one warning, since nothing of what is trained depends on it; an error with `tiermem.strict` |
| refused | any value but the default is an error that gives the reason in the note |
| deprecated | taken with a warning that names its successor; beside its successor it is an error |

Unknown keys are errors that name the nearest known key. `"auto"` is the same as leaving a key out. Numbers may be written as
`5e8` or `"5e8"`. Sizes that end in `_bytes` are bytes and take units ("2GiB", "2GB"); all other sizes are counts of elements.
`tiermem check --config ds.json` says of a file what this page says of all keys, and `"dump_state": true` logs it at the start
of a run. The defaults are those of the documentation of ZeRO; where its sources disagree, the note says which was taken.
"""

DISAGREEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "zero_optimization.offload_param.pin_memory": "The documentation says false, newer sources true. Taken: false as the "
        "default shown, and neither when it is not set.",
        "zero_optimization.offload_optimizer.pin_memory": "The documentation says false, newer sources true. Taken: false as "
        "the default shown, and neither when it is not set.",
        "zero_optimization.sub_group_size": "The class says 1e9, an example of the documentation 1e12. Taken: 1e9 as the "
        "default shown, and neither when it is not set.",
        "zero_optimization.overlap_comm": "null is documented; the sources make it true with stage 3 and false below. "
        "Taken: true.",
        "zero_optimization.stage3_allgather_sequential": "Proposed as stage3_allgather_single_param and merged under this "
        "name. Taken: both, and the one without a prefix.",
        "bf16.immediate_grad_update": "The section's class says false, a constant beside it true. Taken: false.",
        "bf16.check_grad_overflow": "The section's class says true, a constant beside it false. Taken: true.",
        "aio.intra_op_parallelism": "The documentation calls it thread_count, the tuner num_threads. Taken: all three.",
        "aio.overlap_events": "The section says true, the handle of the reference false. Taken: true.",
        "aio.queue_depth": "The section says 8, the handle of the reference 128. Taken: 8 as the default shown.",
    }
)
"""Where documentation and sources of the reference disagree, by key: what each says and what was taken."""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_HEAD, *(line for section in catalogue() for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    if section.intro:
        yield f"{section.intro[0].upper()}{section.intro[1:]}\n"
    has_kinds = any(key.kind for key in section.keys)
    columns = ["key", "values", "default", "here", "note"] if has_kinds else ["key", "default", "here", "note"]
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for key in section.keys:
        cells = [
            f"`{_name(key, section)}`",
            *([key.kind] if has_kinds else []),
            f"`{key.default}`",
            key.fate,
            _note(key),
        ]
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
    yield ""


def _name(key: Key, section: Section) -> str:
    return key.path.removeprefix(f"{section.path}.") if section.path else key.path


def _note(key: Key) -> str:
    """What is asked for, what becomes of it, other spellings, and where sources disagree."""
    said = {
        "computed": f"Here: {key.note}.",
        "inert": f"Does nothing here: {key.note}.",
        "refused": f"Refused: {key.note}.",
        "planned": "" if "Not set:" in key.asks else f"Not set: {key.note}.",
        "deprecated": f"{_sentence(key.note)}",
        "honoured": "",
    }[key.fate]
    spelt = f"Also spelt {' and '.join(f'`{each}`' for each in key.spellings)}." if key.spellings else ""
    asks = f"Use {key.asks}" if key.fate == "deprecated" else key.asks
    parts = [_sentence(asks), said, spelt, DISAGREEMENTS.get(key.path, "")]
    return " ".join(part for part in parts if part)


def _sentence(text: str) -> str:
    """The text with a capital and a full stop; a name such as bf16 at its start stays as it is."""
    is_word = text.split(" ")[0].rstrip(",.").isalpha() and not text.startswith("Use ")
    return f"{text[0].upper() if is_word else text[0]}{text[1:].rstrip('.')}." if text else ""


if __name__ == "__main__":
    sys.stdout.write(page())
