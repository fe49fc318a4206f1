"""Is every setting read by code that acts on it? Reads the source of every floor, runs none of it.

A field of the policy counts as read where an expression that ends with `policy` has the attribute,
outside policy.py and the config; or where a method of the policy reads it that is itself read so. A
key counts as read where any code has an attribute of its name, or where it sets a field of the
policy. All other keys have to say that they change nothing.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator

import pytest
from config_keys import every_model
from test_floors import read_house

from tiermem.keys import COMPUTED, REFUSED
from tiermem.optimizers.base import OptimizerParams
from tiermem.policy import OffloadPolicy
from tiermem.section import SET_BY, ConfigModel

CHECKS = ("__post_init__", "_contradictions")
"""Methods of the policy that look at a field without acting on it."""
READ_BY_NAME = {
    "aio.intra_op_parallelism": "config/io.py: _SPELLINGS",
    "aio.thread_count": "config/io.py: _SPELLINGS",
    "aio.use_gds": "config/io.py: _refuse_gds",
    "zero_optimization.cpu_offload": "config/zero.py: _SUCCESSORS",
    "zero_optimization.cpu_offload_param": "config/zero.py: _SUCCESSORS",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "config/zero.py: _SUCCESSORS",
}
"""Keys whose attribute is looked up by a string, and where."""


def attributes_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each attribute that is read: the last name of the expression that has it, and its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            yield getattr(owner, "id", getattr(owner, "attr", "")), node.attr


# Read when a test asks: every worker of pytest imports this file, one runs it.
modules = functools.cache(lambda: read_house())


@functools.cache
def attributes_read() -> dict[str, set[tuple[str, str]]]:
    """By module."""
    return {name: set(attributes_in(module.tree)) for name, module in modules().items()}


@functools.cache
def names_read() -> frozenset[str]:
    return frozenset(name for pairs in attributes_read().values() for _, name in pairs)


def acted_on() -> set[str]:
    """The attributes of a policy that code outside policy.py and the config reads."""
    return {
        name
        for module, pairs in attributes_read().items()
        if module != "tiermem.policy" and not module.startswith("tiermem.config")
        for owner, name in pairs
        if owner.endswith("policy")
    }


def read_by_methods() -> Iterator[tuple[str, str]]:
    """The methods of the policy, each with a field that it reads."""
    (policy,) = (
        node
        for node in modules()["tiermem.policy"].tree.body
        if isinstance(node, ast.ClassDef) and node.name == OffloadPolicy.__name__
    )
    for method in policy.body:
        if isinstance(method, ast.FunctionDef) and method.name not in CHECKS:
            yield from (
                (method.name, name) for owner, name in attributes_in(method) if owner == "self"
            )


def test_every_field_of_the_policy_is_acted_on() -> None:
    read = acted_on()
    read |= {field for method, field in read_by_methods() if method in read}
    unread = {field.name for field in dataclasses.fields(OffloadPolicy)} - read
    assert not unread, f"no code acts on {sorted(unread)}: remove the fields, keep their keys"


@pytest.mark.parametrize("model", every_model())
def test_a_key_that_no_code_reads_says_that_it_changes_nothing(model: type[ConfigModel]) -> None:
    read = names_read()
    if issubclass(model, OptimizerParams):
        read = read | (set(model.model_fields) - set(model.no_arguments))
    unread = {model.path_of(name) for name in model.model_fields if name not in read}
    assert unread <= {*SET_BY, *COMPUTED, *REFUSED, *READ_BY_NAME}


def test_keys_that_are_read_by_name_exist_and_are_read_no_other_way() -> None:
    paths = {model.path_of(name) for model in every_model() for name in model.model_fields}
    assert set(READ_BY_NAME) <= paths
    assert not {path.rpartition(".")[2] for path in READ_BY_NAME} & names_read()
