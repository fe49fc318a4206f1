"""Rates of a node; the arithmetic of the ZeRO-Infinity paper (arXiv 2104.07857); a simulator of
tasks on lanes."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

# ---- rates ---------------------------------------------------------------------------------------


class Compute(NamedTuple):
    """The seconds of maths that a rank needs for one micro-batch.

    `forward_s` and `backward_s` are seconds per element of the parameters that multiply. `rest_*`
    are the seconds of all modules outside the lists of blocks (the head, the loss); None: those are
    computed from their parameters, too.
    """

    forward_s: float
    backward_s: float
    rest_forward_s: float | None = None
    rest_backward_s: float | None = None
    num_tokens: int | None = None
    """Of the micro-batch; None: not known, so that all experts are expected to be used."""

    def shared_by(self, num_ranks: int) -> Compute:
        """Returns the seconds of each of num_ranks ranks that share the processor on which these
        were measured."""
        rest = (self.rest_forward_s, self.rest_backward_s)
        rest_forward_s, rest_backward_s = (s and s * num_ranks for s in rest)
        return Compute(
            self.forward_s * num_ranks,
            self.backward_s * num_ranks,
            rest_forward_s,
            rest_backward_s,
            self.num_tokens,
        )

    def recomputing(self) -> Compute:
        """Returns the seconds of the same maths with every block's forward made again in
        backward."""
        return self._replace(backward_s=self.backward_s + self.forward_s)

    @staticmethod
    def of_peak(flops: float, num_tokens: int, is_checkpointing: bool = False) -> Compute:
        """Computes seconds from operations per second: 2 per parameter and token forward, 4
        backward, 2 to recompute.

        Products of activations with each other (attention scores) are left out: about seq / (6 x
        hidden) of the rest.
        """
        forward = 2 * num_tokens / flops
        plain = Compute(forward, forward * 2, num_tokens=num_tokens)
        return plain.recomputing() if is_checkpointing else plain


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates in bytes per second, and two overheads in seconds. Raises ValueError for a rate that is
    not positive."""

    disk_read_bytes_s: float
    """Of all paths of a node together; its ranks share them."""
    disk_write_bytes_s: float
    """Of all paths of a node together."""
    link_bytes_s: float = 25e9
    """Between HOST and one rank's GPU, each direction; unused when the CPU computes."""
    network_bytes_s: float = 10e9
    """That one rank sends or receives."""
    kernel_bytes_s: float = 50e9
    """Memory traffic of one rank's optimizer steps."""
    host_memory_bytes_s: float = 65e9
    """Of HOST's memory, for kernels and copies over the link together."""
    is_disk_duplex: bool = False
    """A duplex disk reads and writes at once; any other does one at a time, like the single queue
    of a virtual disk."""
    near_bytes_s: float | None = None
    """Between ranks of one node. None: as fast as the network."""
    gradient_bytes_s: float | None = None
    """Of gradients on their way home: read, added up and written. None: as fast as kernels."""
    sum_bytes_s: float | None = None
    """Checksums of what is read from the disk and written there. None: they cost nothing."""
    use_s: float = 150e-6
    """Seconds of bookkeeping around each module's forward, and each backward."""
    tile_s: float = 100e-6
    """Seconds of bookkeeping around each tile of a step."""
    device_memory_bytes_s: float = 800e9
    """Of an accelerator's memory, reading and writing together."""
    step_passes: float | None = None
    """Passes of an accelerator's optimizer step over states, weight and gradient, and of a norm
    over gradients. None: as torch operations make."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_none = field.default is None and value is None
            if field.name != "is_disk_duplex" and not (
                may_be_none or value > 0 or (field.name in ("use_s", "tile_s") and value == 0)
            ):
                raise ValueError(f"{field.name} is {value}; it must be more than 0")

    def of_rank(self, ranks_on_node: int) -> Rates:
        """Returns the rates of one rank when all ranks of a node are busy: the disk rates divided
        by the ranks."""
        return dataclasses.replace(
            self,
            disk_read_bytes_s=self.disk_read_bytes_s / ranks_on_node,
            disk_write_bytes_s=self.disk_write_bytes_s / ranks_on_node,
        )


# ---- arithmetic of the ZeRO-Infinity paper -------------------------------------------------------
#
# Section 3 of the paper (arXiv 2104.07857) counts the bytes of parameters, model states,
# activations, checkpoints and working memory: 16-bit weights and gradients, fp32 master, gradient,
# momentum and variance of Adam, 20 bytes per parameter. tiermem's own sizes are in `plans/plan.py`;
# they are smaller where tiermem keeps fewer bytes.

# per parameter: 2 weight, 2 gradient, 4 master, 4 momentum, 4 variance, 4 gradient in fp32
STATE_BYTES = 20
_HALF = 2  # bytes of a 16-bit number


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A Transformer as the paper describes it: `num_layers` layers of width `hidden`.

    `checkpoint_interval` is the number of blocks between two activation checkpoints (the paper's
    ci).
    """

    num_layers: int
    hidden: int
    num_heads: int
    checkpoint_interval: int = 1

    @property
    def num_params(self) -> int:
        """Parameters of the layers: 12 x hidden^2 each, four attention matrices and two matrices of
        hidden x 4 hidden."""
        return 12 * self.num_layers * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """Model states: 240 bytes x layers x hidden^2."""
        return STATE_BYTES * self.num_params

    def checkpoint_bytes(self, batch: int, seq: int) -> int:
        """Activation checkpoints of a batch of sequences: one 16-bit vector per token and
        checkpoint."""
        return _HALF * batch * seq * self.hidden * self.num_layers // self.checkpoint_interval

    def activation_bytes(self, batch: int, seq: int) -> int:
        """All activations of a batch, without checkpoints."""
        return self._layer_activation_bytes(batch, seq) * self.num_layers

    @property
    def state_working_bytes(self) -> int:
        """Model state working memory: weights and gradients of the largest operator, hidden to 4 x
        hidden."""
        return 2 * _HALF * self.hidden * 4 * self.hidden

    def activation_working_bytes(self, batch: int, seq: int) -> int:
        """Activation working memory: the activations recomputed between two checkpoints."""
        return self._layer_activation_bytes(batch, seq) * self.checkpoint_interval

    def _layer_activation_bytes(self, batch: int, seq: int) -> int:
        """Returns the bytes of 16 x hidden + 2 x heads x seq numbers per token.

        The paper's formula does not give the size of a number; 2 bytes reproduce its table.
        """
        return _HALF * batch * seq * (16 * self.hidden + 2 * self.num_heads * seq)


PAPER_BATCH = 32
PAPER_SEQ = 1024
PAPER_GPUS = 16
"""The setting of the paper's table of memory (figure 2a): sequences of a node, tokens of each, GPUs
of a node."""

PAPER_MODELS = (
    Transformer(80, 10 * 1024, 128),
    Transformer(100, 20 * 1024, 160),
    Transformer(128, 25 * 1024, 256),
    Transformer(195, 64 * 1024, 512),
    Transformer(315, 160 * 1024, 1024),
)
"""The models of that table, with 0.1 to 100 trillion parameters."""


# ---- tasks on lanes ------------------------------------------------------------------------------
#
# A *lane* runs one task at a time: a disk, one direction of a link, the processor. A *task* is
# ready when all tasks that it comes after have ended, and then occupies its lane for its seconds. A
# free lane takes the ready task with the lowest priority number; of several, the task that became
# ready first. Nothing is random and no task is preempted.
#
#     read 0 |--disk--|                                  tasks 0, 1, 2 of three lanes; "compute 0" comes after "read 0"
#     read 1          |--disk--|
#     compute 0       |------cpu------|
#     compute 1                       |------cpu------|


class Task(NamedTuple):
    """One piece of work on a lane.

    `name` is for pictures; `seconds` is how long the task takes. `after` holds indices of earlier
    tasks in the same list. A free lane takes the task with the lowest `priority`. `phase`, `edge`
    and `among` are labels for totals. The task moves `num_bytes` over its edge and gives
    `payload_bytes` to a collective among some ranks.
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
    is_beside: bool = False
    """Whether the program goes on meanwhile, although the task shares the lane of its maths."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """`tasks`, and for each its begin (`begin_s`) and its end (`end_s`), in seconds from the
    start."""

    tasks: Sequence[Task]
    begin_s: Sequence[float]
    end_s: Sequence[float]

    def phase_end_s(self, phase: str) -> float:
        """Returns the end of a phase's last task, in seconds; 0 for a phase without tasks."""
        return max(
            (end for task, end in zip(self.tasks, self.end_s, strict=True) if task.phase == phase),
            default=0.0,
        )

    def busy_s(self, lane: str, phase: str) -> float:
        """Returns the seconds that a lane worked on tasks of a phase."""
        return sum(task.seconds for task in self.tasks if task.lane == lane and task.phase == phase)


def play(tasks: Sequence[Task]) -> Timeline:
    """Simulates the tasks. Raises ValueError for a task that comes after itself or after a later
    task."""
    then: list[list[int]] = [[] for _ in tasks]  # what comes after each task
    for number, task in enumerate(tasks):
        for each in task.after:
            if not 0 <= each < number:
                raise ValueError(
                    f"task {number} ({task.name}) comes after {task.after}; allowed are earlier "
                    "tasks"
                )
            then[each].append(number)
    num_left = [len(task.after) for task in tasks]
    # (priority, since, number)
    waiting: dict[str, list[tuple[int, float, int]]] = {task.lane: [] for task in tasks}
    busy: set[str] = set()  # lanes
    running: list[tuple[float, int]] = []  # (end, number)
    begin_s = [0.0] * len(tasks)
    end_s = [0.0] * len(tasks)
    now = 0.0
    ready = [number for number, count in enumerate(num_left) if not count]
    changed = set(waiting)  # lanes that may have become able to take a task
    while changed:
        for number in ready:
            lane = tasks[number].lane
            heapq.heappush(waiting[lane], (tasks[number].priority, now, number))
            changed.add(lane)
        for lane in changed - busy:
            if waiting[lane]:
                number = heapq.heappop(waiting[lane])[2]
                busy.add(lane)
                begin_s[number], end_s[number] = now, now + tasks[number].seconds
                heapq.heappush(running, (end_s[number], number))
        now = running[0][0] if running else now
        ready = []
        changed = set()
        while running and running[0][0] == now:
            number = heapq.heappop(running)[1]
            busy.remove(tasks[number].lane)
            changed.add(tasks[number].lane)
            for each in then[number]:
                num_left[each] -= 1
                if not num_left[each]:
                    ready.append(each)
    return Timeline(tasks, begin_s, end_s)
