"""Timeline: tasks that wait for each other and for lanes, played event by event. The whole of the model of time.

A *lane* does one task at a time: a disk, a direction of a link, the processor. A *task* takes a lane for its seconds once
all tasks that it comes after have ended; of those that are ready the lane takes the lowest priority number, then the one that
has been ready longest. Nothing is random, nothing is preempted, and a task without seconds ends when it begins.

    read 0 |--disk--|                                  tasks 0, 1, 2 of three lanes; "compute 0" comes after "read 0"
    read 1          |--disk--|
    compute 0       |------cpu------|
    compute 1                       |------cpu------|
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Task(NamedTuple):
    """One piece of work.

    `after` holds numbers of earlier tasks of the same list. `phase`, `edge` and `among` are labels for who adds up; `num_bytes`
    is what the task moves over its edge, `payload_bytes` what it hands to a collective among some ranks.
    """

    name: str
    lane: str
    seconds: float
    after: tuple[int, ...] = ()
    phase: str = ""
    edge: str = ""
    num_bytes: int = 0
    priority: int = 0
    among: str = ""
    payload_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each task began and ended, in seconds from the start."""

    tasks: Sequence[Task]
    begin_s: Sequence[float]
    end_s: Sequence[float]

    def phase_end_s(self, phase: str) -> float:
        """When the last task of a phase ended; 0 when it has none."""
        return max((end for task, end in zip(self.tasks, self.end_s, strict=True) if task.phase == phase), default=0.0)

    def busy_s(self, lane: str, phase: str) -> float:
        """How long a lane worked on tasks of a phase."""
        return sum(task.seconds for task in self.tasks if task.lane == lane and task.phase == phase)


def play(tasks: Sequence[Task]) -> Timeline:
    """Plays the tasks and says when each ran. Raises ValueError for one that comes after itself or a later one."""
    return _Play(tasks).run()


class _Play:
    """One play: which tasks wait for how many others, which are ready on each lane, what runs now."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._num_awaited = [0] * len(tasks)
        self._followers: list[list[int]] = [[] for _ in tasks]
        self._ready: dict[str, list[tuple[int, float, int]]] = {task.lane: [] for task in tasks}
        self._is_free = dict.fromkeys(self._ready, True)
        self._running: list[tuple[float, int]] = []  # (end, number)
        self._begin_s, self._end_s = [0.0] * len(tasks), [0.0] * len(tasks)
        for number, task in enumerate(tasks):
            if any(not 0 <= each < number for each in task.after):
                raise ValueError(f"task {number} ({task.name}) comes after {task.after}; allowed are earlier tasks")
            earlier = set(task.after)
            self._num_awaited[number] = len(earlier)
            for each in earlier:
                self._followers[each].append(number)

    def run(self) -> Timeline:
        """Plays all of them."""
        for number, awaited in enumerate(self._num_awaited):
            if not awaited:
                self._add_ready(number, 0.0)
        self._start_all(0.0)
        while self._running:
            now = self._running[0][0]
            while self._running and self._running[0][0] == now:
                self._finish(heapq.heappop(self._running)[1], now)
            self._start_all(now)
        return Timeline(self._tasks, self._begin_s, self._end_s)

    def _add_ready(self, number: int, now: float) -> None:
        task = self._tasks[number]
        heapq.heappush(self._ready[task.lane], (task.priority, now, number))

    def _start_all(self, now: float) -> None:
        for lane, ready in self._ready.items():
            if ready and self._is_free[lane]:
                number = heapq.heappop(ready)[2]
                self._is_free[lane] = False
                self._begin_s[number] = now
                heapq.heappush(self._running, (now + self._tasks[number].seconds, number))

    def _finish(self, number: int, now: float) -> None:
        self._end_s[number] = now
        self._is_free[self._tasks[number].lane] = True
        for follower in self._followers[number]:
            self._num_awaited[follower] -= 1
            if not self._num_awaited[follower]:
                self._add_ready(follower, now)
