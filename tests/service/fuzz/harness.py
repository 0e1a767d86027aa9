"""Feeds a target with inputs, one after the other, and says what broke it and how to do it again.

A target's state is made anew for every batch, and every input is drawn from a generator of its own
that the seed, the target and the input's number determine. A failure is therefore repeated by the
batch that it happened in:
``python -m tests.service.fuzz --seed S --target T --first FIRST --count N``.
"""

from __future__ import annotations

import faulthandler
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

HANG_SECONDS = 30.0
"""An input that takes longer is a hang: every thread's stack is printed and the process ends."""

SLOW_SECONDS = 2.0
"""An input of a few hundred bytes that takes more CPU time keeps others from being served. Wall
time says little of that: on a busy machine a process may have to wait that long for its turn."""

MEMORY_BYTES = 4 * 2**30
"""How much a process may grow: an input that asks for more memory than that fails, instead of
taking the machine down."""


class Case(Protocol):
    """What inputs are given to."""

    def __call__(self, rng: random.Random) -> str:
        """Makes one input, feeds it and judges what came of it; returns the outcome in a word.

        Raises:
            Exception: the target broke.
        """


class Target(Protocol):
    """Something that takes inputs from outside.

    Attributes:
        name: on the command line.
        share: of all inputs.
        batch: inputs between two fresh states.
    """

    name: str
    share: float
    batch: int

    def fresh(self) -> AbstractContextManager[Case]:
        """A new state. Its end checks that it still works as it should."""


class Broken(AssertionError):
    """An input broke a target; says how to repeat it."""


@dataclass
class Result:
    """What became of a target's inputs."""

    inputs: int = 0
    seconds: float = 0.0
    slowest_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        shown = ", ".join(f"{count} {word}" for word, count in self.outcomes.most_common(12))
        return (
            f"{self.inputs} inputs in {self.seconds:.1f} s, the slowest "
            f"{self.slowest_seconds * 1000:.0f} ms: {shown}"
        )


def run(target: Target, seed: int, count: int, first: int = 0) -> Result:
    """Feeds inputs ``first`` to ``first + count`` of a seed.

    Raises:
        Broken: one of them broke the target.
    """
    result = Result()
    began = time.monotonic()
    for begin in range(first, first + count, target.batch):
        numbers = range(begin, min(begin + target.batch, first + count))
        number = begin
        try:
            with target.fresh() as case:
                for number in numbers:
                    _feed(case, random.Random(f"{seed} {target.name} {number}"), result)
        except Exception as error:
            raise Broken(
                f"{target.name}: input {number} of seed {seed}: {type(error).__name__}: {error}\n"
                f"repeat: python -m tests.service.fuzz --seed {seed} --target {target.name} "
                f"--first {begin} --count {number - begin + 1}"
            ) from error
    result.seconds = time.monotonic() - began
    return result


def _feed(case: Case, rng: random.Random, result: Result) -> None:
    began = time.process_time()
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)
    try:
        result.outcomes[case(rng)] += 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds = time.process_time() - began
    result.inputs += 1
    result.slowest_seconds = max(result.slowest_seconds, seconds)
    if seconds > SLOW_SECONDS:
        raise AssertionError(f"one input took {seconds:.1f} s of CPU time")


@contextmanager
def limited_memory() -> Iterator[None]:
    """Lets the process grow by MEMORY_BYTES at most."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        size_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
