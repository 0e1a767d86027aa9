"""Malformed inputs, in a process of their own: a crash or a hang ends that one, and is seen."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.service.fuzz.harness import Broken, run
from tests.service.fuzz.targets import TARGETS
from tests.support.programs import ran

COUNT = int(os.environ.get("DISTCA_FUZZ_COUNT", "5000"))
SEED = os.environ.get("DISTCA_FUZZ_SEED", "1")
SECONDS = 120 + COUNT / 300
"""Inputs take one or two milliseconds on a busy machine."""


@pytest.mark.timeout(SECONDS + 30)
def test_malformed_inputs_break_nothing() -> None:
    command = [sys.executable, "-m", "tests.service.fuzz", "--count", str(COUNT), "--seed", SEED]
    done = ran(*command, timeout=SECONDS)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "nothing broke" in done.stdout


class Fragile:
    """Breaks at the first input whose draw is above 0.9."""

    name, share, batch = "fragile", 1.0, 10

    @contextmanager
    def fresh(self) -> Iterator[Callable[[random.Random], str]]:
        yield self.case

    def case(self, rng: random.Random) -> str:
        if rng.random() > 0.9:
            raise KeyError("a bug")
        return "fine"


def test_a_failure_says_how_to_repeat_it() -> None:
    with pytest.raises(Broken) as at:
        run(Fragile(), 5, 1000)
    said = str(at.value).split()
    assert said[said.index("--target") + 1] == "fragile"
    seed, first, count = (int(said[said.index(f"--{n}") + 1]) for n in ("seed", "first", "count"))
    assert seed == 5
    with pytest.raises(Broken):
        run(Fragile(), 5, count, first)
    assert run(Fragile(), 5, count - 1, first).outcomes == {"fine": count - 1}


@pytest.mark.parametrize("name", ["control-plane", "codec"])
def test_inputs_of_a_seed_are_always_the_same(name: str) -> None:
    outcomes = [run(TARGETS[name], 3, 60).outcomes for _ in range(2)]
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", ["control-plane", "codec", "ticks", "greeting", "channel"])
def test_a_batch_of_one_input_ends_well(name: str) -> None:
    """The command that repeats a failure may ask for as few: nothing depends on earlier inputs."""
    assert run(TARGETS[name], 7, 1).inputs == 1
