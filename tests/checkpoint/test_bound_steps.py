"""Is a step bound to its tag and to `latest`, so that another step is told and never opened in its
place? Does a crash open?

Steps 1, 2 and 3 have the tags t1, t2 and t3; `latest` names t3. The files are exchanged, put back
or changed as an attacker, a broken disk or a careless copy would, and as a crash at each point of a
save leaves them.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import model, policy, train
from saved_by_hand import latest_of, rewrite

import tiermem
from tiermem import checkpoint
from tiermem.checkpoint.format import finding
from tiermem.checkpoint.format.fields import ManifestError, crc32c
from tiermem.checkpoint.format.finding import NothingSaved, find
from tiermem.checkpoint.format.manifest import Pointer
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.survey import repair, survey
from tiermem.swap.disk import durable

PLACES = {"copies": "cpu", "in place": "nvme"}
Save = Callable[..., None]


def training(where: str, folder: Path, use: Callable[[Save], None]) -> None:
    """Trains; `use` gets a function that takes a step and saves it. `folder` holds both the run and
    the tags."""
    made = model()
    with tiermem.shard(made, policy(where, folder, keep=3)) as shards:
        optimizer = tiermem.AdamW(made.parameters(), lr=0.01)

        def save(tag: str, **how: bool) -> None:
            train(made, optimizer, 1)
            checkpoint.save(shards, optimizer, folder, tag, **how)

        use(save)


@pytest.fixture(scope="module", params=PLACES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, and beside each tag a copy of `latest` as it was then: latest-t1, ..."""
    folder = tmp_path_factory.mktemp("saved")

    def use(save: Save) -> None:
        for tag in ("t1", "t2", "t3"):
            save(tag)
            shutil.copy(folder / "latest", folder / f"latest-{tag}")

    training(PLACES[request.param], folder, use)
    return folder


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    shutil.copytree(saved, tmp_path / "saved")
    return tmp_path / "saved"


def step_of(where: Path, tag: str | None = None) -> int:
    with Source.open(where, tag) as source:
        return source.manifest.step


def check_told(where: Path, tag: str | None, *words: str) -> None:
    """Opening raises an error with these words, and a survey of the folder reports damage with
    them."""
    with pytest.raises(ManifestError) as caught:
        step_of(where, tag)
    folder = where if where.name == "saved" else where.parent
    found = survey(folder)
    told = "\n".join([*found.faults, *(each.why for each in found.steps if each.state == "broken")])
    assert found.is_damaged
    for word in words:
        assert word in str(caught.value) and word in told, (word, str(caught.value), told)


# ---- another tag ---------------------------------------------------------------------------------


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@pytest.mark.parametrize("what", ["", "tiermem.json"])
def test_exchanged_tags_and_pointers_are_told_by_both_names(place: Path, what: str) -> None:
    exchange(place / "t1" / what, place / "t2" / what)
    for tag, other in (("t1", "'t2'"), ("t2", "'t1'")):
        check_told(place, tag, f"'{tag}'", f"tag {other}")
        check_told(place / tag, None, f"'{tag}'", f"tag {other}")
    assert step_of(place) == 3


def test_a_pointer_that_is_another_ones_is_told(place: Path) -> None:
    shutil.copy(place / "t2" / "tiermem.json", place / "t3" / "tiermem.json")
    check_told(place, None, "'t3'", "tag 't2'", "step 2")
    shutil.copytree(place / "t1", place / "again")
    check_told(place, "again", "'again'", "tag 't1'")


def test_a_pointer_and_a_manifest_that_differ_are_told(place: Path) -> None:
    for name, value in (("step", 7), ("commit", 9), ("tag", "t9")):
        shutil.copy(place / "t2" / "tiermem.json", place / "kept")
        rewrite(place / "t2" / "tiermem.json", **{name: value})
        check_told(place, "t2", "step 2 (tag 't2'" if name != "tag" else "tag 't9'", str(value))
        shutil.copy(place / "kept", place / "t2" / "tiermem.json")


def test_a_folder_that_was_moved_may_have_any_name_and_a_link_too(
    saved: Path, tmp_path: Path
) -> None:
    for folder in saved.glob("tiermem-*"):
        (tmp_path / folder.name).symlink_to(folder)
    shutil.copytree(saved / "t1", tmp_path / "best")
    assert step_of(tmp_path / "best") == 1
    (tmp_path / "linked").symlink_to(saved)
    assert (step_of(tmp_path / "linked"), step_of(tmp_path / "linked" / "t2")) == (3, 2)


# ---- a folder below a folder ---------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACES.values())
def test_a_tag_in_a_folder_of_its_own_is_whole_and_stays_latest(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    tags = ["t0", "of/t1", "of/a/b/t2"]
    training(where, folder, lambda save: [save(tag) for tag in tags] and None)
    for place, due in (
        (folder, tags),
        (folder / "of", tags[1:2]),
        (folder / "of" / "a", tags[2:]),
        (folder / "of" / "t1", tags[1:2]),
    ):
        found = survey(place)
        assert {(step.tag, step.state) for step in found.steps} == {(tag, "whole") for tag in due}
        assert (found.is_damaged, repair(found)) == (False, [])
    assert [step_of(folder, tag) for tag in tags] == [1, 2, 3]
    (folder / "latest").unlink()
    assert repair(survey(folder)) == [f"{folder / 'latest'}: names 'of/a/b/t2' again"]
    whole = "of/a/b/t2", 3, False
    assert (latest_of(folder), step_of(folder), survey(folder).is_damaged) == whole


@pytest.mark.parametrize("tag", ["t/", "./t", "t/."])
@pytest.mark.parametrize("where", PLACES.values())
def test_a_tag_opens_under_its_plain_name(tmp_path: Path, where: str, tag: str) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    training(where, folder, lambda save: save(tag))
    assert [step_of(folder, each) for each in (None, "t", tag)] == [1, 1, 1]
    assert (latest_of(folder), survey(folder).is_damaged) == ("t", False)


# ---- another time --------------------------------------------------------------------------------


def saved_again(folder: Path, where: str, save_latest: bool) -> Path:
    """Saves tag "best" twice; returns a copy of its folder as it was after the first time."""
    aside = folder.parent / "aside"

    def use(save: Save) -> None:
        save("best", save_latest=save_latest)
        shutil.copytree(folder / "best", aside)
        save("best", save_latest=save_latest)
        save("other", save_latest=not save_latest)

    folder.mkdir()
    training(where, folder, use)
    return aside


@pytest.mark.parametrize("save_latest", [True, False])
@pytest.mark.parametrize("where", PLACES.values())
def test_an_older_pointer_is_told(tmp_path: Path, where: str, save_latest: bool) -> None:
    folder = tmp_path / "saved"
    aside = saved_again(folder, where, save_latest)
    assert (latest_of(folder), step_of(folder, "best")) == ("best" if save_latest else "other", 2)
    shutil.copy(aside / "tiermem.json", folder / "best" / "tiermem.json")
    check_told(
        folder,
        "best",
        "step 1 (tag 'best'",
        "step 2 (tag 'best'",
        "an older file was put in the place of a newer one",
    )
    assert repair(survey(folder)) == []  # it knows no better
    if save_latest:
        shutil.copytree(aside, folder / "best", dirs_exist_ok=True)  # the older copy as a whole
        for tag in (None, "best"):
            check_told(folder, tag, "step 1 (tag 'best'", "latest is of step 2 (tag 'best'")


def test_a_tag_that_latest_names_stays_named_when_it_is_saved_again(tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    def use(save: Save) -> None:
        for save_latest in (True, False, False):
            save("best", save_latest=save_latest)
        assert json.loads((folder / "latest").read_bytes())["step"] == 3
        save("other", save_latest=False)

    folder.mkdir()
    training("nvme", folder, use)
    assert (latest_of(folder), step_of(folder)) == ("best", 3)


def test_a_flipped_bit_of_latest_is_told(place: Path) -> None:
    data = (place / "latest").read_bytes()
    for at in range(len(data)):
        (place / "latest").write_bytes(
            data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
        )
        with pytest.raises((ManifestError, NothingSaved), match="latest"):
            find(place)
    (place / "latest").write_bytes(data[:-30])
    check_told(place, None, "latest: its")


@pytest.mark.parametrize("stale", ["latest-t1", "text"])
def test_a_stale_latest_is_told_and_repaired(place: Path, stale: str) -> None:
    if stale == "text":
        (place / "latest").write_text("t1")
    else:
        shutil.copy(place / stale, place / "latest")
    check_told(place, None, "latest: names 't1' and is older than 't3' (step 3)", "fsck --repair")
    assert step_of(place, "t1") == 1  # who names a tag gets it
    assert repair(survey(place)) == [f"{place / 'latest'}: names 't3' again"]
    assert (step_of(place), survey(place).is_damaged) == (3, False)
    assert repair(survey(place)) == []


def test_a_save_while_the_folder_is_opened_is_no_stale_latest(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, read = (place / "latest").read_bytes(), finding.pointers_of

    def read_late(where: Path) -> list[tuple[Path, Pointer, Path]]:
        found = read(where)
        (place / "latest").write_bytes(newest)  # it has been replaced since it was read
        return found

    shutil.copy(place / "latest-t1", place / "latest")
    monkeypatch.setattr(finding, "pointers_of", read_late)
    assert step_of(place) == 3


def test_two_runs_that_save_one_tag_at_once_leave_the_whole_of_one(tmp_path: Path) -> None:
    made = [model(), model(1)]
    with (
        tiermem.shard(made[0], policy("cpu", tmp_path)) as first,
        tiermem.shard(made[1], policy("cpu", tmp_path)) as second,
    ):
        beside = threading.Thread(target=checkpoint.save, args=(second, None, tmp_path, "tag"))

        def observe(step: durable.Step) -> None:
            is_pointer = step.kind == "rename" and step.name.endswith("tiermem.json")
            if step.when == "after" and is_pointer and beside.ident is None:
                beside.start()
                beside.join(0.3)  # it saves now, unless it waits for the other

        with durable.watch(observe):
            checkpoint.save(first, None, tmp_path, "tag")
            beside.join()
        assert step_of(tmp_path) == 0 and not survey(tmp_path).is_damaged


def test_tags_of_another_folder_may_be_put_beside(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    training("cpu", other, lambda save: [save(f"u{number}") for number in range(9)] and None)
    shutil.copytree(other / "u8", place / "u8")
    assert (step_of(place), step_of(place, "u8")) == (3, 9)
    assert not survey(place).is_damaged


# ---- crashes -------------------------------------------------------------------------------------


def crash_states(folder: Path, aside: Path) -> durable.Observer:
    """Copies the folder after each durable step of a save: `aside`/0, ..."""

    def observe(step: durable.Step) -> None:
        if step.when == "after" and step.kind in ("sync", "rename", "remove"):
            shutil.copytree(
                folder,
                aside / str(len(list(aside.iterdir()))),
                ignore=shutil.ignore_patterns("lock"),
            )

    return observe


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", PLACES.values())
@pytest.mark.parametrize("tag", ["new", "t"])
def test_a_crash_at_any_point_of_a_save_opens_the_step_before_or_the_new_one(
    tmp_path: Path, where: str, tag: str
) -> None:
    folder, aside = tmp_path / "saved", tmp_path / "aside"
    folder.mkdir()
    aside.mkdir()

    def use(save: Save) -> None:
        save("t")
        with durable.watch(crash_states(folder, aside)):
            save(tag)

    training(where, folder, use)
    states = sorted(aside.iterdir(), key=lambda each: int(each.name))
    steps = [step_of(each) for each in states]
    assert steps == sorted(steps) and set(steps) == {1, 2}
    assert not any(survey(each).faults for each in states)
    cut = (
        next(each for each, step in zip(states, steps, strict=True) if step == 2)
        if tag == "t"
        else states[-1]
    )
    for _ in range(2):  # a crash after the pointer, and one more: each time another run goes on
        kept = (cut / "latest").read_bytes()
        training("cpu", cut, lambda save: save(tag))
        (cut / "latest").write_bytes(kept)
        assert step_of(cut, tag) == 1
    training("cpu", cut, lambda save: save("last"))
    assert (latest_of(cut), step_of(cut), step_of(cut, tag)) == ("last", 1, 1)


# ---- version 1 -----------------------------------------------------------------------------------


def as_version_1(folder: Path, tag: str) -> None:
    """Writes a copy's pointer and manifest, and `latest`, as version 1 did. (fixtures/ has a whole
    checkpoint of version 1.)"""
    manifest = next((folder / tag).glob("manifest-*.json"))
    content = json.loads(manifest.read_bytes())
    parameters = [
        {name: value for name, value in each.items() if name != "at_rest"}
        for each in content["parameters"]
    ]
    rewrite(manifest, version=1, parameters=parameters, choices=None)
    data = manifest.read_bytes()
    new = dict.fromkeys(("tag", "step", "series", "number"))
    rewrite(
        folder / tag / "tiermem.json",
        version=1,
        bytes=len(data),
        crc32c_of=f"{crc32c(data):08x}",
        **new,
    )
    (folder / "latest").write_text(tag)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder with a step 1 of version 1, tag t."""
    folder = tmp_path / "saved"
    folder.mkdir()
    training("cpu", folder, lambda save: save("t"))
    as_version_1(folder, "t")
    return folder


def test_version_1_opens_as_before(old: Path) -> None:
    assert (step_of(old), step_of(old / "t"), survey(old).is_damaged) == (1, 1, False)
    (old / "t").rename(old / "u")
    assert step_of(old, "u") == 1
    assert repair(survey(old)) == [f"{old / 'latest'}: names 'u' again"]
    assert (latest_of(old), step_of(old)) == ("u", 1)


@pytest.mark.parametrize("tag", ["t", "new"])
def test_a_crash_in_the_first_save_after_version_1_opens(old: Path, tag: str) -> None:
    def twice(save: Save) -> None:
        save("unsaved", save_latest=False)
        save(tag)

    training("cpu", old, twice)
    assert (latest_of(old), step_of(old)) == (tag, 2)
    (old / "latest").write_text("t")
    assert step_of(old) == (2 if tag == "t" else 1)


def test_a_step_of_version_1_in_the_place_of_a_newer_one_is_told(old: Path, tmp_path: Path) -> None:
    shutil.copytree(old / "t", tmp_path / "aside")
    training("cpu", old, lambda save: save("t"))
    shutil.copytree(tmp_path / "aside", old / "t", dirs_exist_ok=True)
    check_told(old, None, "step 1 (tag 't'", "latest is of step 1 (tag 't'")
