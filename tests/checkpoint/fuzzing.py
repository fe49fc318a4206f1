"""Fuzzing: mutations of checkpoint files, bounds that hold for each reading, and a coverage-guided
run (atheris).

    a case      b"<name of a file in the scene>\n" + the bytes that replace the file
    a scene     a folder that holds a small valid checkpoint of one kind; fuzz_readers.py makes and reads it
    the corpus  fixtures/fuzz_corpus.tar.xz: <reader>/<case>; `make test` reads them again

As a program: `fuzzing.py READER CASES SECONDS OUT` runs libFuzzer over a reader, adds cases to the
folder CASES, and writes totals and findings to OUT. A finding does not end the run. `fuzzing.py
keep CASES` makes the corpus of the cases in CASES/<reader>.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import errno
import functools
import gc
import hashlib
import io
import json
import os
import pickle
import pickletools
import random
import re
import resource
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermem.checkpoint.format.fields import ManifestError, crc32c
from tiermem.checkpoint.opening.verified import DamagedState

CORPUS = Path(__file__).parent / "fixtures" / "fuzz_corpus.tar.xz"
CANARY = "executed"  # the folder that a program in a pickle makes, if the program is run

# ---- mutations -----------------------------------------------------------------------------------

_SPLICES = (b"[", b"{", b'"', b"-", b"9" * 30, b"1e999", b"NaN", b"null", b"\0", b"\xff" * 8)
POOL: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 64, 1.5, float("nan"), float("inf"), 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 10**40, "", "x",
    "w", "weight", "master", "..", "\0", "\ud800", "fp32", "split", "8bit", "AAAA", "nan", "F32", "BF16", [], {}, (), [[]],
    [1 << 40], [-1], [1] * 33, [1] * 70, ["w", "w"], [["a", 1], ["a", 1, 2]], [[{}, 1]], {"a": 1}, {1: 2}, (1 << 31, 1 << 31),
    {"$": "set", "value": [[1]]}, {"$": "tensor"}, {"$": 1}, {"$": "tuple", "value": [{"$": "dict", "value": [[[], 1]]}]},
    {"$": "bytes", "value": "A"}, {"$": "scalar", "dtype": "f4", "shape": [1], "value": "AAAAAA=="},
    {"$": "ndarray", "dtype": "f8", "shape": [1 << 40], "value": ""}, {"state": {}, "param_groups": [{}]},
)  # fmt: skip
_OBJECTS: tuple[Any, ...] = (
    b"x", torch.float16, torch.zeros(3), torch.zeros(0), torch.tensor(2.0), torch.zeros(1).expand(1 << 40),
    torch.ones(2, dtype=torch.int8), torch.eye(2).to_sparse(), torch.Size([3, 5]),
)  # fmt: skip


def mutated(
    case: bytes, chance: random.Random, scramble: Callable[[bytes], bytes] | None = None
) -> bytes:
    """A case with another content of its file: other bytes, or other values in its structure, its
    checksum right again."""
    name, _, data = case.partition(b"\n")
    scramble = scramble or (lambda data: scrambled(data, chance))
    ways: list[Callable[[], bytes]] = [
        lambda: scramble(data),
        lambda: data[: chance.randrange(len(data) + 1)],
    ]
    if b'"crc32c":' in data[-30:]:
        ways += [lambda: sealed(scramble(data[:-22]))] * 4
        ways += [
            lambda: sealed(
                json.dumps(replaced(_unsealed(data), chance), separators=(",", ":")).encode()[:-1]
            )
        ] * 12
    elif name.endswith(b".safetensors"):
        ways += [lambda: _with_header(data, chance)] * 6
    elif name.endswith(b".json"):
        ways += [lambda: json.dumps(replaced(json.loads(data), chance), default=str).encode()] * 4
    elif name.endswith(b".metadata"):
        # in Python: a number in the file is no list's length
        load: Callable[[bytes], Any] = vars(pickle)["_loads"]
        ways += [lambda: pickle.dumps(replaced(load(data), chance, _OBJECTS))] * 6
        ways += [lambda: with_program(data, chance, CANARY), lambda: scramble(data[:-1]) + b"."]
    elif name.endswith((b".pt", b".bin")):
        ways += [lambda: _with_pickle(data, lambda inner: with_program(inner, chance, CANARY))] * 2
        ways += [lambda: _with_pickle(data, lambda inner: scramble(inner[:-1]) + b".")] * 4
        if not name.endswith(b"_optim_states.pt"):  # the classes of its objects do not exist here
            ways += [lambda: _saved_anew(data, chance)] * 6
    try:
        data = chance.choice(ways)()
    except Exception:  # a file that has lost its structure, or values that no such file holds
        data = scramble(data)
    return name + b"\n" + data


def scrambled(data: bytes, chance: random.Random) -> bytes:
    """Bytes with a few changed, cut out, or put in."""
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(data) + 1), chance.choice([1, 1, 2, 8, 100])
        new = chance.choice([b"", chance.randbytes(length), chance.choice(_SPLICES)])
        data = data[:at] + new + data[at + chance.choice([0, 1, length]) :]
    return data


def sealed(body: bytes) -> bytes:
    """A file of a checkpoint from its text without the last brace."""
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def _unsealed(data: bytes) -> Any:
    content = json.loads(data)
    del content["crc32c"]
    return content


def replaced(content: Any, chance: random.Random, more: tuple[Any, ...] = ()) -> Any:
    """A structure, with one or two of its values replaced, repeated, moved or removed in place."""
    for _ in range(chance.choice([1, 1, 2])):
        found = list(slots(content))
        if not found:
            break
        # the first ones are near the top
        holder, key = chance.choice(found[: chance.choice([8, 40, 200, None])])
        inside = holder if isinstance(holder, dict | list) else vars(holder)
        how = chance.random()
        if how < 0.15:
            del inside[key]
        elif how < 0.25 and isinstance(inside, dict):
            inside[chance.choice([3, "x", "0.weight", ("a",), "state", "w", ""])] = inside.pop(key)
        elif how < 0.3 and isinstance(inside, list):
            inside.insert(key, copy.deepcopy(inside[key]))
        elif how < 0.5:
            other, place = chance.choice(found)
            inside[key] = copy.deepcopy(
                (other if isinstance(other, dict | list) else vars(other))[place]
            )
        else:
            value = chance.choice(POOL + more)
            is_next = isinstance(inside[key], int | float) and how < 0.7
            inside[key] = (
                inside[key] + chance.choice([-1, 1, 4096]) if is_next else copy.deepcopy(value)
            )
    return content


def slots(content: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of every value in nested dicts, lists and objects; those near the top first."""
    left = collections.deque([content])
    while left:
        holder = left.popleft()
        inside = (
            getattr(holder, "__dict__", None) if not isinstance(holder, dict | list) else holder
        )
        if isinstance(inside, list):
            items: list[tuple[Any, Any]] = list(enumerate(inside))
        elif isinstance(inside, dict) and not isinstance(holder, torch.Tensor):
            items = list(inside.items())
        else:
            continue
        for key, value in items:
            yield holder, key
            left += [each for each in (value, key) if not isinstance(each, str | int | float)]


def _with_header(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file whose header says something else."""
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(replaced(json.loads(data[8 : 8 + length]), chance), default=str).encode()
    said = chance.choice([*[len(text)] * 5, len(text) + 1, length, 1 << 40, (1 << 64) - 1])
    return said.to_bytes(8, "little") + text + data[8 + length :]


def _saved_anew(data: bytes, chance: random.Random) -> bytes:
    """A torch file with other values in it."""
    out = io.BytesIO()
    torch.save(replaced(torch.load(io.BytesIO(data)), chance, _OBJECTS), out)
    return out.getvalue()


def _with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A torch file with another program in it."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new,
    ):
        for name in old.namelist():
            inner = old.read(name)
            new.writestr(name, change(inner) if name.endswith("data.pkl") else inner)
    return out.getvalue()


def with_program(data: bytes, chance: random.Random, canary: str) -> bytes:
    """A pickle that makes a folder, by one of the ways in which a pickle calls a function."""
    name = canary.encode()
    text = b"X" + len(name).to_bytes(4, "little") + name
    code = f"__import__('os').mkdir({canary!r})".encode()
    program = chance.choice(
        [
            b"cposix\nmkdir\n" + text + b"\x85R0",
            b"(cposix\nmkdir\n" + text + b"o0",
            b"(" + text + b"iposix\nmkdir\n0",
            b"\x8c\x05posix\x8c\x05mkdir\x93" + text + b"\x85R0",
            b"cbuiltins\neval\nX" + len(code).to_bytes(4, "little") + code + b"\x85R0",
            b"cposix\nmkdir\n" + text + b"\x85\x810",
            b"ctorch._utils\n_rebuild_tensor_v2\ncposix\nmkdir\n" + text + b"\x85R\x85R0",
            b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemscposix\nmkdir\nsb0",
            b"ctorch.hub\nload\n" + text + b"\x85R0",
        ]
    )
    starts = [place for _, _, place in pickletools.genops(data) if place]
    at = chance.choice([starts[0], starts[0], *starts])
    return data[:at] + program + data[at:]


# ---- one reading, and what must hold for it ------------------------------------------------------

MEMORY_TIMES, SPARE_BYTES = 10, 64 << 20
MOST_CPU_S = 0.7  # beside what the bytes take
_CHANGES = frozenset(
    ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.system",
     "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect", "shutil.rmtree")
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_forbidden: list[str] | None = None  # events that a reader must not cause, while one reads


class Wrong(AssertionError):
    """A reading did what no reading may do."""


class Bound(NamedTuple):
    """What one reading took."""

    cpu_s: float
    grown_bytes: int  # peak of resident memory, above its size before
    is_read: bool  # it was valid


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _forbidden is not None and (
        event in _CHANGES or (event == "open" and int(arguments[2] or 0) & _WRITES)
    ):
        _forbidden.append(f"{event}{arguments!r:.200}")


sys.addaudithook(_audit)


def bounded(read: Callable[[], object], num_bytes: int, cpu_s_per_byte: float = 20e-6) -> Bound:
    """Reads a file of so many bytes. Raises Wrong for an error that is not documented, too much
    memory or CPU time, a change to the disk, a program that was run, and a descriptor that stays
    open."""
    global _forbidden
    most = MEMORY_TIMES * num_bytes + SPARE_BYTES
    descriptors = _descriptors()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, start = _status("VmRSS"), time.process_time()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + most, hard))
    _forbidden, is_read = [], False
    try:
        read()
        is_read = True
    except (ValueError, OSError) as error:
        _check_error(error, num_bytes)
    finally:
        seen, _forbidden = _forbidden, None
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    took = Bound(time.process_time() - start, _status("VmHWM") - before, is_read)
    if seen:
        raise Wrong(f"it changed something: {seen}")
    if took.grown_bytes > most or took.cpu_s > MOST_CPU_S + cpu_s_per_byte * num_bytes:
        raise Wrong(f"{num_bytes} bytes took {took}")
    if _descriptors() > descriptors:
        gc.collect()
        if (now := _descriptors()) > descriptors:
            raise Wrong(f"{now - descriptors} descriptors stay open")
    return took


def _check_error(error: ValueError | OSError, num_bytes: int) -> None:
    """Raises Wrong for an error that docs/errors.md does not list, or that names nothing."""
    is_ours = type(error) in (ValueError, ManifestError) or isinstance(error, OSError)
    if isinstance(error, DamagedState):
        is_ours = error.errno == errno.EIO
    if not is_ours or not 0 < len(str(error)) < 20_000 + num_bytes:
        raise Wrong(
            f"{type(error).__qualname__} of {len(str(error))} characters: {error!s:.300}"
        ) from error


def _status(name: str) -> int:
    with open("/proc/self/status", "rb") as file:
        return int(re.search(rb"%s:\s+(\d+) kB" % name.encode(), file.read())[1]) << 10  # type: ignore[index]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- the corpus, and a run -----------------------------------------------------------------------


def kept_cases(reader: str) -> Iterator[tuple[str, bytes]]:
    """(name, case) of a reader's kept cases."""
    with tarfile.open(CORPUS) as archive:
        for member in archive:
            if member.isfile() and Path(member.name).parent.name == reader:
                yield member.name, archive.extractfile(member).read()  # type: ignore[union-attr]


def _instrument() -> None:
    """Makes atheris see the branches of the readers' functions, torch's unpickler among them."""
    import atheris

    for found in gc.get_objects():
        if callable(found) and hasattr(found, "__code__"):
            module = getattr(found, "__module__", None) or ""
            if module.startswith(
                (
                    "tiermem.checkpoint",
                    "tiermem.weights_io",
                    "torch._weights_only_unpickler",
                    "pickle",
                )
            ):
                atheris.instrument_func(found)


def _keep(cases: Path) -> None:
    """Writes the corpus: of each reader the smallest cases that reach all branches, smallest
    first."""
    from checkpoint.fuzz_readers import READERS

    with tempfile.TemporaryDirectory() as folder, tarfile.open(CORPUS, "w:xz") as archive:
        for name, make in READERS.items():
            scene, seen = make(Path(folder) / name), set[tuple[str, int, int]]()
            read = {
                case: None
                for _, case in sorted(
                    (file.stat().st_size, file.read_bytes()) for file in (cases / name).iterdir()
                )
            }
            for case in read:
                with contextlib.suppress(Wrong):
                    found = _edges(functools.partial(scene.bounded, case, 1.0))
                    if found - seen:
                        seen |= found
                        member = tarfile.TarInfo(f"{name}/{hashlib.sha256(case).hexdigest()[:12]}")
                        member.size = len(case)
                        archive.addfile(member, io.BytesIO(case))


def _edges(run: Callable[[], object]) -> set[tuple[str, int, int]]:
    """(file, line, next line) of what runs of the readers."""
    found: set[tuple[str, int, int]] = set()

    def trace(frame: Any, event: str, _: Any) -> Any:
        file, before = frame.f_code.co_filename, frame.f_lineno
        if "/tiermem/checkpoint/" not in file and not file.endswith("/tiermem/weights_io.py"):
            return None

        def line(frame: Any, event: str, _: Any) -> Any:
            nonlocal before
            found.add((file, before, frame.f_lineno))
            before = frame.f_lineno
            return line

        return line

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return found


def _finding(error: BaseException, case: bytes, out: Path) -> None:
    """Keeps a case, once for each place and kind of the failure."""
    place = "".join(
        line
        for line in traceback.format_exc().splitlines(True)
        if "File" in line or "Error" in line
    )
    name = f"{type(error).__name__}-{hashlib.sha256(re.sub(r'[0-9]+', '', place).encode()).hexdigest()[:8]}"
    if not (out / name).exists():
        (out / name).write_bytes(case)
        (out / f"{name}.txt").write_text(traceback.format_exc())


def _run(name: str, cases: Path, seconds: int, out: Path) -> None:
    import atheris
    from checkpoint.fuzz_readers import READERS

    warnings.simplefilter("ignore")
    out.mkdir(parents=True, exist_ok=True)
    cases.mkdir(parents=True, exist_ok=True)
    scene = READERS[name](out / "scene")
    seeds = list(scene.seeds())
    for number, case in enumerate(seeds):
        (cases / f"seed-{number}").write_bytes(case)
    for kept, case in kept_cases(name) if CORPUS.exists() else ():
        (cases / Path(kept).name).write_bytes(case)
    totals = {
        "executions": 0,
        "read": 0,
        "cpu_s": 0.0,
        "most_cpu_s": 0.0,
        "most_grown_bytes": 0,
        "findings": 0,
    }

    told_s = 0.0

    def one(case: bytes) -> None:
        nonlocal told_s
        totals["executions"] += 1
        if time.monotonic() > told_s + 1:  # libFuzzer ends the process without a word
            told_s = time.monotonic()
            totals.update({"cases": len(os.listdir(cases)), "process_cpu_s": time.process_time()})
            (out / f"{name}.json").write_text(json.dumps(totals))
        try:
            took = scene.bounded(case)
        except Exception as error:
            totals["findings"] += 1
            _finding(error, case, out)
            return
        totals["most_cpu_s"] = max(totals["most_cpu_s"], took.cpu_s)
        totals["most_grown_bytes"] = max(totals["most_grown_bytes"], took.grown_bytes)
        totals["cpu_s"] += took.cpu_s
        totals["read"] += took.is_read

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.3:  # libFuzzer keeps one file of several that are read together
            data = chance.choice([each for each in seeds if len(each) <= most] or [data])
        made = mutated(data, chance, lambda data: atheris.Mutate(data, most) if data else b"x")
        return made if len(made) <= most else data

    one(seeds[0])  # imports what is imported once
    _instrument()
    limits = [
        f"-max_total_time={seconds}",
        "-max_len=40000",
        "-timeout=60",
        "-rss_limit_mb=4000",
        "-print_final_stats=1",
    ]
    atheris.Setup(
        [sys.argv[0], *limits, f"-artifact_prefix={out}/", str(cases)], one, custom_mutator=mutate
    )
    atheris.Fuzz()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
    if sys.argv[1] == "keep":
        _keep(Path(sys.argv[2]))
    else:
        _run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
