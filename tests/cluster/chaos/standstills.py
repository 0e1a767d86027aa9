"""How long training stands still while a schedule of faults is carried out: real processes, real
UCX, mutual TLS. A standstill is the time between two ticks that a rank completes, if it is longer
than any in a run that nobody disturbs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path

from tests.cluster.chaos.processes import Job, JobSettings, Process
from tests.cluster.chaos.scenario import RUN_SECONDS, References
from tests.cluster.chaos.schedules import TRAINERS, Schedule
from tests.cluster.chaos.tick_log import TickEvent

BOUND_SECONDS = 15.0
"""No standstill is longer, with default timeouts, but for the time in which processes that a job
cannot do without are not there."""

APART_SECONDS = 8.0
"""The same where documents are whole on their ranks, whatever is not there."""

SHORTEST_SECONDS = 1.0
"""What is called a standstill; a step of the job below takes less."""

NEAR_SECONDS = 10.0
"""Acts that began so long before a standstill are shown with it."""

RESTART_SECONDS = 0.5
"""After so long a process that has ended unasked is started again."""

LAYERS, TOKENS_PER_RANK, CHECKPOINT_EVERY = 4, 512, 10


def settings(steps: int, *, apart: bool = False) -> JobSettings:
    """A small job, whose steps take a tenth of a second or two."""
    return JobSettings(
        steps=steps,
        layers=LAYERS,
        tokens_per_rank=TOKENS_PER_RANK,
        n_nodes=3 if apart else 4,
        more=(f"--checkpoint-every={CHECKPOINT_EVERY}",),
    )


@dataclass(frozen=True)
class Done:
    """Something that was done to a process at ``time.monotonic()`` ``at``."""

    at: float
    what: str


@dataclass(frozen=True)
class Standstill:
    """A rank completed no tick.

    Attributes:
        rank: which one.
        step: that it was in.
        begin, end: ``time.monotonic()``.
        outage_seconds: of it, trainers that were started again were still loading, or every
            control plane was dead, loading or stopped: what no timeout can shorten.
    """

    rank: int
    step: int
    begin: float
    end: float
    outage_seconds: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def own_seconds(self) -> float:
        """What it took beside :attr:`outage_seconds`."""
        return self.seconds - self.outage_seconds


@dataclass
class Chaos:
    """Carries a schedule out on a running job, and starts again what ends.

    Args:
        job: that runs.
        schedule: what to do.

    Attributes:
        done: what was done.
        outages: when trainers were loading or no control plane ran, from and until.
    """

    job: Job
    schedule: Schedule
    done: list[Done] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._acts = list(self.schedule.acts)
        self._outage_began: float | None = None
        # What is to be done at which time: go on with a process, or start it.
        self._due: list[tuple[float, str, str]] = []
        self._stopped: set[str] = set()

    def run(self) -> None:
        """Returns once every trainer has ended well.

        Raises:
            AssertionError: the run hangs.
        """
        deadline = time.monotonic() + RUN_SECONDS
        while not self._finished():
            if time.monotonic() > deadline:
                raise AssertionError(f"no end after {RUN_SECONDS:.0f} s\n{self.job.tails()}")
            self._act()
            self._follow_up()
            self._start_what_ended()
            self._note_outage()
            time.sleep(0.01)

    def _finished(self) -> bool:
        return all(trainer.popen.poll() == 0 for trainer in self.job.trainers)

    def _act(self) -> None:
        while self._acts and self._acts[0].step <= self.job.steps_begun:
            act, now = self._acts.pop(0), time.monotonic()
            self._note(str(act))
            for name in act.kills:
                self.job.processes[name].popen.kill()
                # Trainers are started again together, see below.
                if name not in TRAINERS:
                    heappush(self._due, (now + act.back_seconds, name, "start"))
            for name in act.stops:
                if self.job.processes[name].alive:
                    self.job.processes[name].signal(signal.SIGSTOP)
                    self._stopped.add(name)
                    heappush(self._due, (now + act.stop_seconds, name, "go on"))

    def _follow_up(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, name, what = heappop(self._due)
            process = self.job.processes[name]
            if what == "go on":
                self._stopped.discard(name)
                if process.alive:
                    process.signal(signal.SIGCONT)
                    self._note(f"{name} goes on")
            elif not process.alive:
                self._start(name)

    def _start_what_ended(self) -> None:
        trainers = self.job.trainers
        if any(trainer.popen.poll() not in (None, 0) for trainer in trainers):
            # As an elastic launcher does: when all have ended, all are started again.
            if not any(trainer.alive for trainer in trainers):
                (self.job.folder / "rendezvous").unlink(missing_ok=True)
                self._note("every trainer has ended, and is started again")
                for trainer in trainers:
                    trainer.log.rename(trainer.log.with_suffix(f".{len(self.done)}.log"))
                for rank in range(len(trainers)):
                    self.job.start_trainer(rank, "--resume")
            return
        waits = {name for _, name, _ in self._due}
        for name, process in self.job.processes.items():
            if process.alive or name in TRAINERS or name in waits:
                continue
            heappush(self._due, (time.monotonic() + RESTART_SECONDS, name, "start"))

    def _note_outage(self) -> None:
        ready = not any(map(_is_loading, self.job.trainers)) and any(
            process.alive and process.serving
            for name, process in self.job.processes.items()
            if name in self.job.control_planes and name not in self._stopped
        )
        now = time.monotonic()
        if not ready and self._outage_began is None:
            self._outage_began = now
        elif ready and self._outage_began is not None:
            self.outages.append((self._outage_began, now))
            self._outage_began = None

    def _start(self, name: str) -> None:
        self._note(f"{name} is started again")
        self._stopped.discard(name)
        if name in self.job.control_planes:
            self.job.start_control_plane(name, wait=False)
        else:
            self.job.start_node(int(name.removeprefix("node-")))

    def _note(self, what: str) -> None:
        self.done.append(Done(time.monotonic(), what))


@dataclass(frozen=True)
class Outcome:
    """What a run under a schedule has shown.

    Attributes:
        job: whose logs are left.
        schedule: that was carried out.
        done: what was done.
        standstills: longest first.
    """

    job: Job
    schedule: Schedule
    done: Sequence[Done]
    standstills: Sequence[Standstill]

    @property
    def longest_seconds(self) -> float:
        return max((each.seconds for each in self.standstills), default=0.0)

    @property
    def longest_own_seconds(self) -> float:
        """Without the time in which processes were not there."""
        return max((each.own_seconds for each in self.standstills), default=0.0)

    @property
    def is_too_long(self) -> bool:
        """Whether a standstill is longer than allowed."""
        if self.schedule.apart:
            return self.longest_seconds > APART_SECONDS
        return self.longest_own_seconds > BOUND_SECONDS

    def describe(self, standstill: Standstill) -> Iterator[str]:
        """What was done near a standstill, in the order of time."""
        begin = standstill.begin
        yield (
            f"rank {standstill.rank} stood still for {standstill.seconds:.1f} s in step "
            f"{standstill.step}, {standstill.outage_seconds:.1f} s of it as processes were not "
            "there"
        )
        for act in self.done:
            if begin - NEAR_SECONDS < act.at <= standstill.end:
                yield f"    {act.at - begin:+7.2f} s  {act.what}"


def run(schedule: Schedule, chosen: JobSettings, references: References, folder: Path) -> Outcome:
    """Runs a job under ``schedule``. If trainers are killed it must save checkpoints.

    Raises:
        AssertionError: it hangs, a step is missing, a loss differs, or a process is left.
    """
    expected = references.of(chosen)
    job = Job(folder, chosen, mutual_tls=True, standby=schedule.standby)
    with job:
        chaos = Chaos(job, schedule)
        chaos.run()
    expected.check(job)
    left = job.left_behind()
    assert not left, f"processes are left: {left}"
    found = standstills(job, chaos.outages)
    return Outcome(job, schedule, chaos.done, found)


def standstills(job: Job, outages: Sequence[tuple[float, float]]) -> list[Standstill]:
    """Those of a run, longest first; of all ranks that stood still at a time only the longest."""
    found: list[Standstill] = []
    for rank, ticks in enumerate(job.ticks):
        ticks.read()
        complete = [event for event in ticks.events if event.complete]
        for before, after in pairwise(complete):
            if after.at - before.at >= SHORTEST_SECONDS:
                found.append(_standstill(rank, before, after, outages))
    found.sort(key=lambda each: each.seconds, reverse=True)
    longest: list[Standstill] = []
    for each in found:
        if not any(each.begin < other.end and other.begin < each.end for other in longest):
            longest.append(each)
    return longest


def _standstill(
    rank: int, before: TickEvent, after: TickEvent, outages: Sequence[tuple[float, float]]
) -> Standstill:
    out = sum(max(min(after.at, end) - max(before.at, begin), 0.0) for begin, end in outages)
    return Standstill(rank, after.step, before.at, after.at, out)


def _is_loading(trainer: Process) -> bool:
    """Whether it runs and has not come so far as to open its job."""
    return trainer.alive and b"listening on" not in trainer.log.read_bytes()
