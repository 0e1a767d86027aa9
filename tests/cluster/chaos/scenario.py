"""A run that is disturbed, and what must be true of it afterwards."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from distca.apps.report.step_log import StepLog
from distca.run_folder import RunFolder
from tests.cluster.chaos.processes import Job, JobSettings
from tests.cluster.chaos.tick_log import longest_wait

LOSS_TOLERANCE = 1e-6
"""Of a step's loss, relative. Another plan sums gradients in another order; float32 rounds each sum
by 6e-8."""

KILLED_SECONDS = 5.0
"""From a process's death to the next completed tick, with default timeouts."""

STOPPED_SECONDS = 0.5 + 2.5 + 3.0
"""The same for one that is stopped or cut off: ping_quiet_seconds, ping_timeout_seconds, and the
recovery itself, see docs/configuration.md."""

RUN_SECONDS = 900.0
"""No run takes longer, or it hangs."""


@dataclass
class Fault:
    """Something that was done to a run.

    Attributes:
        what: in words.
        at: ``time.monotonic()``.
        bound_seconds: for how long no tick may be completed, at most.
    """

    what: str
    at: float
    bound_seconds: float


@dataclass
class Disturbance:
    """A running job, and the means to disturb it; everything it decides comes from its seed."""

    job: Job
    rng: random.Random
    faults: list[Fault] = field(default_factory=list)

    def note(self, what: str, bound_seconds: float) -> None:
        """From now on the run has to cope with ``what``."""
        self.faults.append(Fault(what, time.monotonic(), bound_seconds))

    def kill(self, *names: str) -> None:
        """``kill -9``, all at once."""
        self.note(f"killed {' and '.join(names)}", KILLED_SECONDS)
        for name in names:
            self.job.processes[name].popen.kill()
        for name in names:
            self.job.processes[name].popen.wait(10)

    def stop(self, name: str, bound_seconds: float = STOPPED_SECONDS) -> None:
        """SIGSTOP."""
        self.note(f"stopped {name}", bound_seconds)
        self.job.processes[name].signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        self.job.processes[name].signal(signal.SIGCONT)

    def random_node(self) -> str:
        """A node that serves."""
        return self.rng.choice(sorted(node.name for node in self.job.nodes if node.serving))

    def pause(self, seconds: float) -> bool:
        """Lets the run go on for a while; returns whether it still does."""
        deadline = time.monotonic() + seconds
        while self.job.training and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.job.training

    def wait_for_step(self, step: int, seconds: float = RUN_SECONDS) -> None:
        """Waits until rank 0 has begun ``step``."""
        self._wait(lambda: self.job.steps_begun >= step, f"step {step}", seconds)

    def wait_for_tick(self, *, backward: bool, after_step: int, seconds: float = 60.0) -> None:
        """Waits until rank 0 is in the middle of a forward or backward pass: a tick that is neither
        its first nor its last has been sent and is not complete."""

        def there() -> bool:
            ticks = self.job.ticks[0]
            ticks.read()
            last = ticks.events[-1] if ticks.events else None
            middle = self.job.settings.layers // 2
            return (
                last is not None
                and last.step > after_step
                and not last.complete
                and last.backward is backward
                and last.layer == middle
            )

        self._wait(there, "a backward tick" if backward else "a forward tick", seconds, 0.0005)

    def finish(self) -> None:
        """Waits until every trainer has ended well."""
        self._wait(lambda: not self.job.training, "the end", RUN_SECONDS)

    def _wait(
        self, condition: Callable[[], bool], what: str, seconds: float, every: float = 0.02
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.job.training and what != "the end":
                raise AssertionError(f"the run ended before {what}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come in {seconds:.0f} s\n{self.job.tails()}")
            time.sleep(every)


@dataclass(frozen=True)
class Losses:
    """The loss of every step of an undisturbed run."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, job: Job) -> Losses:
        records = StepLog(RunFolder(job.run_folder).step_log).read()
        assert [record.step for record in records] == list(range(job.settings.steps))
        return cls(tuple(record.loss for record in records))

    def check(self, job: Job) -> float:
        """Every step of ``job`` is there, with the same loss; returns the largest difference."""
        found = Losses.of(job).values
        differences = [abs(a - b) / abs(b) for a, b in zip(found, self.values, strict=True)]
        worst = max(range(len(differences)), key=differences.__getitem__)
        assert differences[worst] <= LOSS_TOLERANCE, (
            f"step {worst}: the loss is {found[worst]:.9f}, undisturbed {self.values[worst]:.9f}"
        )
        return differences[worst]


class References:
    """Undisturbed runs, one for each kind of job; made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._losses: dict[JobSettings, Losses] = {}

    def of(self, settings: JobSettings) -> Losses:
        """The losses of ``settings``; the number of nodes and checksums do not matter to them."""
        more = tuple(option for option in settings.more if option != "--no-checksums")
        plain = replace(settings, n_nodes=1, planning_seconds=0.0, more=more)
        if plain not in self._losses:
            folder = self._folder / f"undisturbed-{len(self._losses)}"
            with Job(folder, plain) as job:
                Disturbance(job, random.Random(0)).finish()
                self._losses[plain] = Losses.of(job)
        return self._losses[plain]


@contextmanager
def disturbed(job: Job, references: References, seed: int) -> Iterator[Disturbance]:
    """Runs ``job`` while the block disturbs it; then everything that must hold is checked.

    Raises:
        AssertionError: the run failed or hung, a step is missing, a loss differs, a recovery took
            longer than its bound, or a process is left.
    """
    expected = references.of(job.settings)
    with job:
        disturbance = Disturbance(job, random.Random(seed))
        disturbance.wait_for_step(1)
        yield disturbance
        disturbance.finish()
    difference = expected.check(job)
    left = job.left_behind()
    assert not left, f"processes are left: {left}"
    print(f"\nseed {seed}: {job.settings.steps} steps, losses differ by {difference:.1e} at most")
    _check_recoveries(disturbance)


def _check_recoveries(disturbance: Disturbance) -> None:
    faults = disturbance.faults
    ends = [fault.at for fault in faults[1:]] + [float("inf")]
    too_slow = []
    for fault, end in zip(faults, ends, strict=True):
        waits = []
        for ticks in disturbance.job.ticks:
            ticks.read()
            # What is done next has a bound of its own.
            waits.append(longest_wait(ticks.events, fault.at, end))
        seconds = max(waits)
        print(f"  {fault.what}: no tick for {seconds:.2f} s at most")
        if seconds > fault.bound_seconds:
            too_slow.append(f"{fault.what}: {seconds:.2f} s, allowed {fault.bound_seconds:.1f} s")
    assert not too_slow, "; ".join(too_slow)
