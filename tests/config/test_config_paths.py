"""Paths in a config: every form of them, both sections and `tiermem.paths` together, and what
clashes."""

from __future__ import annotations

from typing import Any

import pytest

from tiermem.config import ConfigError, load_config
from tiermem.policy import NvmePath, OffloadPolicy

A, B, C = (NvmePath(name) for name in ("/a", "/b", "/c"))  # type: ignore[arg-type]
WEIGHED = [{"path": "/a", "weight": 2.5}, {"path": "/b", "weight": 1}]


def config_of(
    param: Any = None, optim: Any = None, own: Any = None, device: str = "nvme"
) -> dict[str, Any]:
    """Stage 3 with both sections; a section without paths has no such key."""
    sections = {
        name: {"device": device, **({"nvme_path": paths} if paths is not None else {})}
        for name, paths in (("offload_param", param), ("offload_optimizer", optim))
    }
    return {
        "zero_optimization": {"stage": 3, **sections},
        **({"tiermem": {"paths": own}} if own is not None else {}),
    }


def policy_of(*args: Any, **kwargs: Any) -> OffloadPolicy:
    return load_config(config_of(*args, **kwargs)).policy()


def problems(config: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("written", "paths"),
    [
        ("/a", (A,)),
        (["/a", "/b"], (A, B)),
        ({"path": "/a"}, (A,)),
        ({"path": "/a", "max_bytes": "200GiB", "weight": 2.5}, (NvmePath("/a", 200 << 30, 2.5),)),  # type: ignore[arg-type]
        ([{"path": "/a", "max_bytes": 4096}, "/b"], (NvmePath("/a", 4096), B)),  # type: ignore[arg-type]
        ([{"path": "/a", "weight": "auto"}], (A,)),
    ],
)
def test_every_form_is_taken_in_every_place(written: Any, paths: tuple[NvmePath, ...]) -> None:
    assert policy_of(written, written).paths == paths
    assert policy_of(own=written).paths == paths


def test_paths_of_two_sections_are_the_union_in_order() -> None:
    assert policy_of(["/a", "/b"], ["/c", "/a"]).paths == (A, B, C)


def test_path_of_a_section_that_is_not_on_nvme_is_left_out() -> None:
    assert policy_of("/a", "/b", device="cpu").paths == ()
    assert policy_of(own="/a", device="cpu").paths == ()


def test_gradients_on_nvme_use_the_paths_of_any_section() -> None:
    config = config_of(None, "/a", device="cpu") | {"tiermem": {"grads": "nvme"}}
    assert load_config(config).policy().paths == (A,)
    config = config_of(device="cpu") | {"tiermem": {"grads": "nvme", "paths": ["/b"]}}
    assert load_config(config).policy().paths == (B,)


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
@pytest.mark.parametrize("path", [{}, {"nvme_path": None}, {"nvme_path": ""}, {"nvme_path": []}])
def test_nvme_without_a_path_is_refused(section: str, path: dict[str, Any]) -> None:
    config = {"zero_optimization": {"stage": 3, section: {"device": "nvme", **path}}}
    (found,) = problems(config)
    assert found.startswith(f"zero_optimization.{section}.nvme_path")


def test_nvme_without_a_path_points_at_both_places() -> None:
    assert (
        "or set tiermem.paths"
        in problems(config_of("/a"))["zero_optimization.offload_optimizer.nvme_path"]
    )


def test_own_paths_give_weights_to_the_folders_that_sections_name() -> None:
    paths = policy_of("/b", ["/a", "/b"], WEIGHED).paths
    assert paths == (NvmePath("/a", None, 2.5), NvmePath("/b", None, 1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("param", "optim"), [("/a", "/b"), (["/a", "/b"], None), (None, ["/b", "/a"])]
)
def test_own_paths_may_stand_for_sections_that_name_none(param: Any, optim: Any) -> None:
    assert len(policy_of(param, optim, WEIGHED).paths) == 2


def test_own_paths_that_differ_from_a_section_s_are_refused_with_both() -> None:
    found = problems(config_of("/a", ["/a", "/b"], ["/a", "/c"]))
    assert found == {
        "tiermem.paths": "/a, /c given, but zero_optimization.offload_param.nvme_path and "
        "zero_optimization.offload_optimizer.nvme_path name /a, /b; remove one of the two, or name "
        "the same folders in "
        "both"
    }


def test_own_paths_do_not_clash_with_a_section_that_is_not_on_nvme() -> None:
    config = config_of("/a", own=["/b"])
    config["zero_optimization"]["offload_param"]["device"] = "cpu"
    assert load_config(config).policy().paths == (B,)


@pytest.mark.parametrize(
    ("param", "optim", "own"),
    [
        ("/a", {"path": "/a", "max_bytes": 4096}, None),
        ({"path": "/a", "max_bytes": 8192}, {"path": "/a", "max_bytes": 4096}, None),
        ({"path": "/a", "max_bytes": 4096}, None, "/a"),
        (None, None, [{"path": "/a", "weight": 1}, {"path": "/a", "weight": 2}]),
    ],
)
def test_one_folder_with_two_caps_or_weights_is_refused(param: Any, optim: Any, own: Any) -> None:
    param, optim = (param or optim, optim or param) if own is None else (param, optim)
    (message,) = problems(config_of(param, optim, own)).values()
    assert "give it one cap and one weight" in message


def test_weights_for_some_paths_alone_are_refused() -> None:
    found = problems(config_of(own=[{"path": "/a", "weight": 1}, "/b"]))
    assert found["tiermem.paths"].startswith("/b without a weight")


@pytest.mark.parametrize(
    ("written", "path", "said"),
    [
        (
            [{"path": "/a", "max_byte": 1}],
            "tiermem.paths.0.max_byte",
            "did you mean tiermem.paths.max_bytes?",
        ),
        (
            ["/a", {"path": "/b", "weights": 1}],
            "tiermem.paths.1.weights",
            "did you mean tiermem.paths.weight?",
        ),
        ([{"weight": 1}], "tiermem.paths.0.path", "is missing"),
        (["/a", ""], "tiermem.paths.1", "an empty path given"),
        ([{"path": " "}], "tiermem.paths.0", "an empty path given"),
        (7, "tiermem.paths", "7 given"),
        ([7], "tiermem.paths.0", "7 given; allowed is the path of a folder"),
        ([{"path": "/a", "weight": 0}], "tiermem.paths.0.weight", "greater than 0"),
        (
            [{"path": "/a", "max_bytes": 0}],
            "tiermem.paths.0.max_bytes",
            "greater than or equal to 1",
        ),
        ([{"path": "/a", "max_bytes": "much"}], "tiermem.paths.0.max_bytes", "'much' given"),
    ],
)
def test_mistake_in_a_path_names_its_place(written: Any, path: str, said: str) -> None:
    found = problems(config_of(own=written))
    assert list(found) == [path]
    assert said in found[path]


def test_unknown_key_of_a_section_s_path_names_the_nearest() -> None:
    found = problems(config_of({"path": "/a", "max_byte": 1}, "/a"))
    (message,) = found.values()
    assert "zero_optimization.offload_param.nvme_path.max_bytes" in message


def test_report_shows_paths_as_they_are_written() -> None:
    rows = {
        row.key: row
        for row in load_config(config_of("/a", "/a", [{"path": "/a", "max_bytes": 4096}])).report()
    }
    assert rows["zero_optimization.offload_param.nvme_path"].value == ["/a"]
    assert rows["tiermem.paths"][1:4] == ([{"path": "/a", "max_bytes": 4096}], "honoured", "")


def test_report_says_when_own_paths_do_not_matter() -> None:
    rows = {row.key: row for row in load_config({"tiermem": {"paths": "/a"}}).report()}
    assert rows["tiermem.paths"][2:4] == ("computed", "matters with device nvme; no device is")
