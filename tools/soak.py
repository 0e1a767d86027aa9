"""A job that trains for an hour while servers join, drain and die; what must stay flat is measured.

    python -m tools.soak --minutes 60 --folder /tmp/soak --figure docs/img/soak.png

Every long-lived process (control plane, trainers, and a node that is left in peace) is sampled:
resident memory, open files, threads. The other nodes come and go. At the end the samples are drawn,
and the run fails if something grew.
"""

from __future__ import annotations

import argparse
import csv
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import psutil

from tests.cluster.chaos.processes import Job, JobSettings, Process

SAMPLE_SECONDS = 10.0
EVENT_SECONDS = (8.0, 30.0)
"""Between two things that happen to the pool."""

WARM_UP = 0.25
"""Share of the run whose samples do not count: pools, caches and allocators fill."""

N_NODES = 4
PEACEFUL = "node-0"
DRAIN_SECONDS = 180.0
"""A drain takes 30 s, and closing a few more; on a busy machine more still. A hang never ends."""

STEPS = 10_000_000
"""More than an hour can hold; the run is asked to stop."""


@dataclass(frozen=True)
class Quantity:
    """Something that is sampled.

    Attributes:
        name, unit: for people.
        allowed_share, allowed_units: how much it may grow from the first third of the samples that
            count to the last: a share of its size or so many units, whichever is more.
    """

    name: str
    unit: str
    allowed_share: float
    allowed_units: float


# What glibc keeps between allocations moves by a few MiB; a connection more or less is a file or
# two. A leak of one buffer, file or thread a recovery would be hundreds of them in an hour.
MEMORY = Quantity("resident memory", "MiB", 0.03, 8.0)
FILES = Quantity("open files", "files", 0.0, 6.0)
THREADS = Quantity("threads", "threads", 0.0, 2.0)
QUANTITIES = (MEMORY, FILES, THREADS)


@dataclass
class Samples:
    """Of one process: seconds since the beginning, and by quantity its values."""

    seconds: list[float] = field(default_factory=list)
    values: dict[Quantity, list[float]] = field(
        default_factory=lambda: {quantity: [] for quantity in QUANTITIES}
    )

    def take(self, process: psutil.Process, seconds: float) -> None:
        with process.oneshot():
            self.seconds.append(seconds)
            self.values[MEMORY].append(process.memory_info().rss / 2**20)
            self.values[FILES].append(process.num_fds())
            self.values[THREADS].append(process.num_threads())

    def growth(self, quantity: Quantity) -> float:
        """Median of the last third less that of the first, of the samples that count."""
        values = self.values[quantity][int(len(self.seconds) * WARM_UP) :]
        third = len(values) // 3
        return statistics.median(values[-third:]) - statistics.median(values[:third])

    def allowed(self, quantity: Quantity) -> float:
        size = statistics.median(self.values[quantity])
        return max(quantity.allowed_share * size, quantity.allowed_units)


@dataclass
class Soak:
    """A running soak."""

    job: Job
    rng: random.Random
    began: float
    samples: dict[str, Samples] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)
    draining: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def run(self, until_seconds: float) -> None:
        """Until the time is over; raises if a trainer fails."""
        next_sample = next_event = self.seconds
        while self.seconds < until_seconds and self.job.training:
            if self.seconds >= next_sample:
                self.sample()
                next_sample += SAMPLE_SECONDS
            if self.seconds >= next_event:
                self.something_happens()
                next_event = self.seconds + self.rng.uniform(*EVENT_SECONDS)
            self.follow_drains()
            time.sleep(0.2)

    def sample(self) -> None:
        for name in ("control-plane", PEACEFUL, *(p.name for p in self.job.trainers)):
            process = psutil.Process(self.job.processes[name].popen.pid)
            self.samples.setdefault(name, Samples()).take(process, self.seconds)

    def something_happens(self) -> None:
        """A node joins, drains or dies."""
        index = self.rng.randrange(1, N_NODES)
        name = f"node-{index}"
        node = self.job.processes[name]
        if name in self.draining:
            return
        if not node.alive:
            self.note(f"{name} joins")
            self.job.start_node(index)
        elif not node.serving:
            return
        elif self.rng.random() < 0.5:
            self.note(f"{name} drains")
            node.signal(signal.SIGTERM)
            self.draining[name] = self.seconds
        else:
            self.note(f"{name} dies")
            node.kill()

    def follow_drains(self) -> None:
        """A drained node exits with 0, and in time."""
        for name, since in list(self.draining.items()):
            node = self.job.processes[name]
            if node.alive and self.seconds - since < DRAIN_SECONDS:
                continue
            del self.draining[name]
            code = node.popen.poll()
            if code != 0:
                self.failures.append(f"{name} was drained and ended with {code}")
                node.kill()

    def note(self, what: str) -> None:
        self.events.append((self.seconds, what))
        print(f"{self.seconds:7.0f} s  step {self.job.steps_begun}: {what}", flush=True)

    def verdict(self) -> list[str]:
        """What is wrong; empty if all is flat."""
        wrong = list(self.failures)
        for name, samples in self.samples.items():
            for quantity in QUANTITIES:
                growth, allowed = samples.growth(quantity), samples.allowed(quantity)
                print(
                    f"{name}: {quantity.name} {statistics.median(samples.values[quantity]):.0f} "
                    f"{quantity.unit}, grew by {growth:+.1f} (allowed {allowed:.1f})"
                )
                if growth > allowed:
                    wrong.append(f"{name}: {quantity.name} grew by {growth:.1f} {quantity.unit}")
        return wrong


def save_samples(soak: Soak, path: Path) -> None:
    """One line a sample, for whoever wants to draw it otherwise."""
    with path.open("w", newline="") as table:
        writer = csv.writer(table)
        writer.writerow(["process", "seconds", *(f"{q.name} ({q.unit})" for q in QUANTITIES)])
        for name, samples in soak.samples.items():
            columns = [samples.values[quantity] for quantity in QUANTITIES]
            for seconds, *values in zip(samples.seconds, *columns, strict=True):
                writer.writerow([name, f"{seconds:.1f}", *(f"{value:.1f}" for value in values)])


def draw(soak: Soak, path: Path) -> None:
    """Three panels over time, one for each quantity."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(QUANTITIES), 1, sharex=True, figsize=(9, 8), constrained_layout=True
    )
    for panel, quantity in zip(panels, QUANTITIES, strict=True):
        for name, samples in soak.samples.items():
            minutes = [seconds / 60 for seconds in samples.seconds]
            panel.plot(minutes, samples.values[quantity], label=name, linewidth=1.2)
        for seconds, what in soak.events:
            colour = {"dies": "tab:red", "drains": "tab:orange"}.get(what.split()[1], "tab:green")
            panel.axvline(seconds / 60, color=colour, alpha=0.25, linewidth=0.6)
        panel.set_ylabel(f"{quantity.name} ({quantity.unit})")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].legend(loc="lower right", ncols=4, fontsize="small")
    panels[0].set_title(
        f"{soak.job.steps_begun} training steps; nodes that join (green), drain (orange), "
        "die (red)",
        fontsize="medium",
    )
    panels[-1].set_xlabel("minutes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def stop(trainers: Sequence[Process]) -> None:
    """Asks the trainers to end after the step they are in."""
    for trainer in trainers:
        trainer.signal(signal.SIGINT)
    for trainer in trainers:
        trainer.popen.wait(120)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="for logs; a new one")
    parser.add_argument("--figure", type=Path, required=True, help="PNG to draw")
    chosen = parser.parse_args()
    settings = JobSettings(
        steps=STEPS, n_nodes=N_NODES, layers=2, more=("--checkpoint-every=1000000",)
    )
    with Job(chosen.folder, settings) as job:
        soak = Soak(job, random.Random(chosen.seed), time.monotonic())
        soak.run(chosen.minutes * 60)
        steps = job.steps_begun
        stop(job.trainers)
    save_samples(soak, chosen.folder / "samples.csv")
    draw(soak, chosen.figure)
    wrong = soak.verdict()
    counts = {
        word: sum(what.endswith(word) for _, what in soak.events)
        for word in ("joins", "drains", "dies")
    }
    print(f"{steps} steps in {chosen.minutes:g} minutes; {counts}; seed {chosen.seed}")
    for problem in wrong:
        print(f"NOT FLAT: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
