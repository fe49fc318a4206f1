"""Does a launch hear everything, end everything and say how it ended?"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tiermem.tools.job.launcher import CHANNEL_FD, Message, Observer, Outcome, Sample, launch
from tiermem.tools.memory_limit import MemoryLimit


class Heard(Observer):
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.lines: list[str] = []
        self.samples: list[Sample] = []

    def on_message(self, message: Message) -> None:
        self.messages.append(message)

    def on_output(self, line: str) -> None:
        self.lines.append(line)

    def on_sample(self, sample: Sample) -> None:
        self.samples.append(sample)


def run(code: str, observer: Observer | None = None, **options: float) -> Outcome:
    head = (
        "import json, os, signal, sys, time\ndef tell(**f): os.write(int(sys.argv[1]), "
        "json.dumps(f).encode() + b'\\n')\n"
    )
    return launch(
        [sys.executable, "-S", "-c", head + code, CHANNEL_FD],
        MemoryLimit(),
        [observer] if observer else (),
        **options,
    )


def test_messages_and_output_arrive_in_order_and_whole() -> None:
    heard = Heard()
    run(
        (
            "for i in range(5000): tell(kind='n', i=i); print('line', i)\nsys.stderr.write('no "
            "newline')"
        ),
        heard,
    )
    assert [message["i"] for message in heard.messages] == list(range(5000))
    assert sorted(heard.lines) == sorted([f"line {i}" for i in range(5000)] + ["no newline"])


def test_what_was_written_before_a_sudden_death_is_heard() -> None:
    heard = Heard()
    outcome = run(
        (
            "tell(kind='phase', name='falling')\nos.write(int(sys.argv[1]), b'{\"kind\": "
            "\"ph')\nos.kill(os.getpid(), 9)"
        ),
        heard,
    )
    assert [message["name"] for message in heard.messages] == ["falling"]
    assert outcome.describe() == "ended by SIGKILL during falling"
    assert outcome.exit_code == 137
    assert not outcome.is_killed_at_cap


def test_memory_is_sampled_and_a_late_peak_believed() -> None:
    heard = Heard()
    outcome = run(
        "x = bytearray(64 << 20); time.sleep(0.3); tell(kind='done', peak_rss_bytes=1 << 40)", heard
    )
    assert max(sample.resident_bytes for sample in heard.samples) > 64 << 20
    assert outcome.peak_rss_bytes == 1 << 40
    times = [sample.time_ns for sample in heard.samples]
    assert times == sorted(times)


def test_children_of_the_child_are_counted() -> None:
    heard = Heard()
    inner = "import time; x = bytearray(96 << 20); time.sleep(0.6)"
    run(f"import subprocess; subprocess.run([sys.executable, '-S', '-c', {inner!r}])", heard)
    assert max(sample.resident_bytes for sample in heard.samples) > 96 << 20


def test_an_exit_status_is_told() -> None:
    heard = Heard()
    outcome = run("print('the reason'); sys.exit(5)", heard)
    assert outcome.exit_code == 5
    assert outcome.describe() == "ended with status 5 during start"
    assert heard.lines == ["the reason"]


# the second until the child has its own
@pytest.mark.parametrize("handler", ["stop", "signal.default_int_handler"])
def test_an_interrupt_reaches_the_child_which_ends_by_itself(handler: str) -> None:
    code = f"""
def stop(*_): tell(kind='phase', name='cleaning up'); sys.exit(0)
signal.signal(signal.SIGINT, {handler})
tell(kind='phase', name='ready')
time.sleep(60)
"""

    class Interrupting(Heard):
        def on_message(self, message: Message) -> None:
            if message["name"] == "ready":
                os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    outcome = run(code, Interrupting())
    assert time.monotonic() - started < 30
    assert outcome.is_interrupted
    assert outcome.phase == ("cleaning up" if handler == "stop" else "ready")
    assert outcome.describe() == "stopped as asked, cleanly"


def test_a_second_interrupt_kills() -> None:
    code = (
        "signal.signal(signal.SIGINT, lambda *_: tell(kind='phase', "
        "name='deaf'))\ntell(kind='phase', name='ready')\n"
    )

    class Insisting(Heard):
        def on_message(self, message: Message) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run(code + "while True: time.sleep(1)", Insisting())
    assert outcome.exit_code == 137
    assert outcome.is_interrupted


def test_handlers_of_signals_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    run("pass")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_silent_child_is_stopped_when_patience_ends() -> None:
    outcome = run("tell(kind='phase', name='thinking'); time.sleep(60)", patience_s=0.3)
    assert outcome.is_stalled
    assert outcome.describe() == "stopped: no progress during thinking"


def test_what_a_child_leaves_running_is_ended() -> None:
    heard = Heard()
    run("import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)", heard)
    pid = int(heard.lines[0])
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        if open(f"/proc/{pid}/stat").read().split()[2] == "Z":  # noqa: SIM115
            break
        time.sleep(0.01)
    else:
        assert not os.path.exists(f"/proc/{pid}")


def test_an_observer_that_raises_ends_the_child() -> None:
    class Failing(Observer):
        def on_message(self, message: Message) -> None:
            raise RuntimeError(f"pid {message['pid']}")

    with pytest.raises(RuntimeError, match="pid") as caught:
        run("tell(kind='x', pid=os.getpid()); time.sleep(60)", Failing())
    assert not os.path.exists(f"/proc/{str(caught.value).split()[1]}")


def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        launch(["/no/such/program"], MemoryLimit())
