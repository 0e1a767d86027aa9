"""Schedules: what is done to the processes of a run, and when. Pure data, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.cluster.chaos.processes import CONTROL_PLANE, STANDBY

NODES = tuple(f"node-{index}" for index in range(4))
TRAINERS = ("trainer-0", "trainer-1")

FIRST_STEP = 6
"""Nothing happens before: the job starts."""

SPACING = (9, 16)
"""Steps between two acts, at least and at most."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """What is done, all at once, when rank 0 has begun a step.

    Attributes:
        step: of rank 0.
        kills: processes that are killed. Nodes and control planes are started again.
        stops: processes that are stopped (SIGSTOP), and go on.
        back_seconds: until the killed ones are started again; trainers are when all have ended.
        stop_seconds: until the stopped ones go on.
    """

    step: int
    kills: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    back_seconds: float = 1.0
    stop_seconds: float = 0.0

    def __str__(self) -> str:
        done = []
        if self.kills:
            done.append(f"kill {', '.join(self.kills)}")
        if self.stops:
            done.append(f"stop {', '.join(self.stops)} for {self.stop_seconds:.1f} s")
        return " and ".join(done)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens in one run.

    Attributes:
        name: of the schedule.
        acts: in the order of their steps.
        standby: whether a second control plane stands by.
        apart: every document is whole on one rank, and there are three nodes.
    """

    name: str
    acts: tuple[Act, ...]
    standby: bool = False
    apart: bool = False


def nodes_and_control_plane(rng: random.Random, steps: int) -> Schedule:
    """Kills, stops and restarts of nodes and of the control plane, alone and together."""

    def act(step: int) -> Act:
        nodes = tuple(rng.sample(NODES, rng.choice((1, 1, 2))))
        with_control_plane = rng.random() < 0.5
        back_seconds = rng.uniform(0.5, 4.0)
        if rng.random() < 0.6:
            kills = (*nodes, CONTROL_PLANE) if with_control_plane else nodes
            return Act(step=step, kills=kills, back_seconds=back_seconds)
        kills = (CONTROL_PLANE,) if with_control_plane else ()
        seconds = rng.choice((3.0, 12.0))
        return Act(
            step=step, kills=kills, stops=nodes, back_seconds=back_seconds, stop_seconds=seconds
        )

    return Schedule(name="nodes-and-control-plane", acts=_spread(rng, steps, act))


def away(rng: random.Random, steps: int) -> Schedule:
    """Nodes and the one control plane, killed and stopped at random, the latter away for long:
    ranks whose documents are whole on them wait for nobody."""

    def act(step: int) -> Act:
        victims = [*rng.sample(NODES[:3], rng.choice((0, 1, 1, 2)))]
        if rng.random() < 0.6 or not victims:
            victims.append(CONTROL_PLANE)
        stopped = tuple(victim for victim in victims if rng.random() < 0.5)
        return Act(
            step=step,
            kills=tuple(victim for victim in victims if victim not in stopped),
            stops=stopped,
            back_seconds=rng.choice((rng.uniform(0.5, 5.0), rng.uniform(5.0, 33.0))),
            stop_seconds=rng.uniform(1.0, 14.0),
        )

    return Schedule(name="away", acts=_spread(rng, steps, act), apart=True)


def control_plane_with_trainer(rng: random.Random, steps: int) -> Schedule:
    """The control plane dies or stops together with a trainer that stops for a while; at last both
    are killed, and the job goes on from its checkpoint."""
    quarter = steps // 4

    def trainer() -> str:
        return rng.choice(TRAINERS)

    return Schedule(
        name="control-plane-with-trainer",
        acts=(
            Act(
                step=FIRST_STEP,
                kills=(CONTROL_PLANE,),
                stops=(trainer(),),
                stop_seconds=rng.uniform(1.0, 5.0),
            ),
            Act(step=quarter, stops=(CONTROL_PLANE, trainer()), stop_seconds=rng.uniform(4.0, 8.0)),
            Act(step=2 * quarter, kills=(CONTROL_PLANE, trainer()), back_seconds=0.5),
            Act(step=3 * quarter, kills=(trainer(),)),
        ),
    )


def control_plane_stopped(rng: random.Random, steps: int) -> Schedule:
    """The leading control plane stops for 30 s, and a node dies meanwhile."""
    return Schedule(
        name="control-plane-stopped",
        acts=(
            Act(step=steps // 5, stops=(CONTROL_PLANE,), stop_seconds=30.0),
            Act(step=steps // 5 + 1, kills=(rng.choice(NODES),), back_seconds=5.0),
        ),
        standby=True,
    )


def two_control_planes(rng: random.Random, steps: int) -> Schedule:
    """Two control planes with one lock, killed and stopped in turn, also with nodes."""

    def act(step: int) -> Act:
        name = rng.choice((CONTROL_PLANE, STANDBY))
        nodes = tuple(rng.sample(NODES, rng.choice((0, 1, 2))))
        if rng.random() < 0.6:
            return Act(step=step, kills=(name, *nodes), back_seconds=rng.uniform(0.5, 4.0))
        return Act(step=step, kills=nodes, stops=(name,), stop_seconds=rng.uniform(5.0, 20.0))

    return Schedule(name="two-control-planes", acts=_spread(rng, steps, act), standby=True)


def one_host(rng: random.Random, steps: int) -> Schedule:
    """Two nodes die or stop at once, again and again."""

    def act(step: int) -> Act:
        nodes = tuple(rng.sample(NODES, 2))
        if rng.random() < 0.5:
            return Act(step=step, kills=nodes, back_seconds=rng.uniform(0.5, 4.0))
        if rng.random() < 0.5:
            return Act(step=step, stops=nodes, stop_seconds=12.0)
        return Act(step=step, kills=nodes[:1], stops=nodes[1:], stop_seconds=12.0)

    return Schedule(name="one-host", acts=_spread(rng, steps, act))


def anything(rng: random.Random, steps: int) -> Schedule:
    """Every kind of act; the control plane may have a standby. Without one it is away for no longer
    than a job can bear: nobody else makes plans."""
    standby = rng.random() < 0.5
    control_planes = (CONTROL_PLANE, STANDBY) if standby else (CONTROL_PLANE,)

    def act(step: int) -> Act:
        victims = list(rng.sample(NODES, rng.choice((0, 1, 1, 2, 3))))
        if rng.random() < 0.5 or not victims:
            victims.append(rng.choice(control_planes))
        stopped = [victim for victim in victims if rng.random() < 0.4]
        longest = 30.0 if standby or not {CONTROL_PLANE}.intersection(stopped) else 8.0
        if rng.random() < 0.2:
            stopped.append(rng.choice(TRAINERS))
            longest = min(longest, 8.0)
        return Act(
            step=step,
            kills=tuple(victim for victim in victims if victim not in stopped),
            stops=tuple(stopped),
            back_seconds=rng.uniform(0.2, 5.0),
            stop_seconds=rng.uniform(1.0, longest),
        )

    return Schedule(name="random", acts=_spread(rng, steps, act), standby=standby)


SCHEDULES: Mapping[str, Callable[[random.Random, int], Schedule]] = {
    "nodes-and-control-plane": nodes_and_control_plane,
    "away": away,
    "control-plane-with-trainer": control_plane_with_trainer,
    "control-plane-stopped": control_plane_stopped,
    "two-control-planes": two_control_planes,
    "one-host": one_host,
    "random": anything,
}
"""By name: each makes a schedule for a number of steps from a seed's random numbers."""


def _spread(rng: random.Random, steps: int, act: Callable[[int], Act]) -> tuple[Act, ...]:
    """Acts over the whole run."""
    acts, step = [], FIRST_STEP
    while step < steps - SPACING[0] // 2:
        acts.append(act(step))
        step += rng.randint(*SPACING)
    return tuple(acts)
