"""The ticks that may hold memory for messages on a server whose memory is limited.

A tick ends only when all its ranks have sent their rows, so a server that gave its memory to parts
of many ticks could end none of them. Two rules keep it from that:

* Memory is given to whole ticks, for the messages of all ranks, in the order of the tick's lane.
* Every lane is entitled to enough for the largest of its ticks, whatever the others hold. What is
  left over is lent to lanes that read ahead.

In a pipeline, ranks come to the same tick at very different times, so a lane here is what one rank
sends, in the order of its schedule, and a tick holds memory for that rank's messages until it is
answered. What a rank sends next can always be received, however many microbatches there are.

So the first unfinished tick of each lane can always be received. Of the ranks, which all run the
lanes in one order, the one that has come least far waits for nothing but such ticks: there is
always one that can go on. All others wait until memory is free; their messages stay with their
senders.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core_attention.tick import Tick

Lane = int | tuple[int, int]
"""A nano-batch; of pipelines, a rank and which of its microbatches' nano-batches."""

LaneKey = tuple[str, Lane]
"""A job and a lane of it."""


class MemoryTooSmall(RuntimeError):
    """The ticks of a plan cannot be received one at a time; the message has the numbers."""


@dataclass(eq=False)
class _Lane:
    """The unfinished ticks of one lane.

    Attributes:
        needs: bytes by tick, in order.
        admitted: ticks that have their memory, a prefix of ``needs``.
        entitled_bytes: of the largest tick.
        held_bytes: of the admitted ticks.
    """

    needs: OrderedDict[Tick, int] = field(default_factory=OrderedDict)
    admitted: set[Tick] = field(default_factory=set)
    entitled_bytes: int = 0
    held_bytes: int = 0

    @property
    def charged_bytes(self) -> int:
        """The bytes that the other lanes cannot have."""
        return max(self.entitled_bytes, self.held_bytes)

    def update(self) -> None:
        """After ``needs`` or ``admitted`` have changed."""
        self.admitted &= self.needs.keys()
        self.entitled_bytes = max(self.needs.values(), default=0)
        self.held_bytes = sum(self.needs[tick] for tick in self.admitted)

    def forget(self, ticks: Sequence[Tick]) -> None:
        """``ticks`` will not be run."""
        for tick in ticks:
            del self.needs[tick]
        if ticks:
            self.update()

    def waiting_up_to(self, tick: Tick) -> list[Tick]:
        """``tick`` and those before it, without the admitted ones."""
        waiting = []
        for each in self.needs:
            if each not in self.admitted:
                waiting.append(each)
            if each == tick:
                break
        return waiting


class TickMemory:
    """Admits ticks to a limited memory. Not thread-safe.

    Args:
        limit_bytes: for messages of all jobs.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lanes: dict[LaneKey, _Lane] = {}

    def add_step(self, job_id: str, lanes: Mapping[Lane, Sequence[tuple[Tick, int]]]) -> None:
        """A step is planned, perhaps not for the first time: its former plan counts no longer.

        Args:
            job_id: the job.
            lanes: by lane, the step's ticks in order, each with the bytes of its messages.

        Raises:
            MemoryTooSmall: not all lanes can hold their largest tick at a time. Nothing is added.
        """
        before = {key: lane.needs.copy() for key, lane in self._lanes.items()}
        steps = {tick.step for ticks in lanes.values() for tick, _ in ticks}
        for (other_job, _), lane in self._lanes.items():
            if other_job == job_id:
                lane.forget([tick for tick in lane.needs if tick.step in steps])
        for name, ticks in lanes.items():
            lane = self._lanes.setdefault((job_id, name), _Lane())
            lane.needs.update(ticks)
            # A step that is planned after a later one comes first all the same.
            order = sorted(lane.needs, key=lambda tick: tick.step)
            lane.needs = OrderedDict((tick, lane.needs[tick]) for tick in order)
            lane.update()
        entitled = sum(lane.entitled_bytes for lane in self._lanes.values())
        if entitled > self._limit_bytes:
            largest = max(lane.entitled_bytes for lane in self._lanes.values())
            self._restore(before)
            raise MemoryTooSmall(
                f"a tick of each lane has {entitled} bytes of messages, the largest {largest}; the "
                f"limit is {self._limit_bytes} bytes: raise --buffer-limit-mib or set "
                "--capacity-rows"
            )

    def keep_steps(self, steps: Iterable[tuple[str, int]]) -> None:
        """Forgets the ticks of all steps but these (job and number)."""
        kept = set(steps)
        for (job_id, _), lane in self._lanes.items():
            lane.forget([tick for tick in lane.needs if (job_id, tick.step) not in kept])
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.needs}

    def admit(self, job_id: str, tick: Tick, name: Lane) -> bool:
        """Returns whether receives of ``tick`` may be posted now, in the lane of that name. A tick
        that is not known any more may: nothing will come of it."""
        lane = self._lanes.get((job_id, name))
        if lane is None or tick not in lane.needs or tick in lane.admitted:
            return True
        asked = lane.waiting_up_to(tick)
        more = sum(lane.needs[each] for each in asked)
        is_first = tick == next(iter(lane.needs))
        others = sum(each.charged_bytes for each in self._lanes.values() if each is not lane)
        charged = max(lane.entitled_bytes, lane.held_bytes + more)
        if not is_first and others + charged > self._limit_bytes:
            return False
        lane.admitted.update(asked)
        lane.held_bytes += more
        return True

    def end(self, job_id: str, tick: Tick, name: Lane) -> None:
        """A tick is over in the lane of that name. Idempotent."""
        lane = self._lanes.get((job_id, name))
        if lane is not None and lane.needs.pop(tick, None) is not None:
            lane.update()

    def _restore(self, needs: Mapping[LaneKey, OrderedDict[Tick, int]]) -> None:
        self._lanes = {key: lane for key, lane in self._lanes.items() if key in needs}
        for key, lane in self._lanes.items():
            lane.needs = needs[key]
            lane.update()
