"""Random kinds of steps that nobody chose, and where a plan of them misses the planner's promise.

A kind draws its servers (2 to 4096, alike or of speeds from 0.1 to 1, on hosts of 1 or 8), tokens
a rank, tolerance and document lengths: log-normal with light and heavy tails, Pareto, all alike, or
short ones with a few giants. Documents are cut at the end of a rank or go on on the next ones. The
promise is that in both phases the busiest server is at most tolerance + 0.02 above the target load,
the time at which all would finish if the plan's tasks could be divided at will; on servers of one
speed that is the imbalance. A plan that misses it is an exception only where ``makespan_bound``
proves that the busiest server is within the promise of the earliest end that any plan can have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.planner import K, in_a_row, servers_of
from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from tests.service.control_plane.oracles.makespan_bound import MakespanBound

PROMISE = 0.02
"""By how much the imbalance may exceed 1 + tolerance."""
LADDER = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16)
NOTICEABLE = 2e-3
"""Relative difference of seconds or bytes that counts: a thousandth is the precision of caps."""
MOST_DOCUMENTS = 200_000
LENGTHS = ("log-normal", "pareto", "alike", "giants", "tiny")
SPEEDS = ("alike", "alike", "any", "half slow", "one slow")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A random kind of step, and the step."""

    name: str
    tolerance: float
    manifest: Manifest
    servers: list[PlanningServer]

    @property
    def speeds(self) -> Float64Array:
        return np.array([server.speed for server in self.servers])


def draw_kind(seed: int, profile: CostProfile, most_servers: int = 4096) -> Kind:
    """The kind number ``seed``; fewer servers where ``most_servers`` says so."""
    generator = np.random.default_rng(seed)
    n = int(np.exp(generator.uniform(np.log(2), np.log(most_servers + 1))))
    tokens = K * int(2 ** generator.integers(2, 9))
    lengths_name = str(generator.choice(LENGTHS))
    speeds_name, spans = str(generator.choice(SPEEDS)), bool(generator.integers(2))
    lengths = _draw_lengths(generator, lengths_name, n, tokens)
    tolerance = float(generator.choice([0.02, 0.03, 0.05, 0.1]))
    speed = _draw_speeds(generator, speeds_name, n)
    per_host = int(generator.choice([1, 8]))
    servers = [
        replace(server, speed=float(speed[i]), host=f"host-{i // per_host}")
        for i, server in enumerate(servers_of(n, profile))
    ]
    manifest = in_a_row(lengths, n, tokens, spans=spans)
    name = (
        f"{seed}: {lengths_name}, longest {lengths.max()}, {'span' if spans else 'cut at'} ranks, "
        f"n={n} T={tokens // K}K, {per_host} a host, speeds {speeds_name}, tolerance {tolerance:g}"
    )
    return Kind(name=name, tolerance=tolerance, manifest=manifest, servers=servers)


def _draw_lengths(generator: np.random.Generator, name: str, n: int, tokens: int) -> Int64Array:
    """Lengths that hold ``n * tokens`` tokens together, or as many as the most documents do."""
    total = n * tokens
    longest = int(min(total, 2 ** generator.uniform(12, 22)))
    count = min(MOST_DOCUMENTS, total)
    median = 2 ** generator.uniform(5, 13)
    if name == "log-normal":
        drawn = median * np.exp(generator.uniform(0.3, 2.5) * generator.standard_normal(count))
    elif name == "pareto":
        drawn = median * (1 + generator.pareto(generator.uniform(0.7, 3), count))
    elif name == "tiny":
        drawn = generator.integers(1, 2 * int(min(median, 256)), count).astype(np.float64)
    else:
        drawn = np.full(count, median)
        if name == "giants":
            drawn[generator.integers(0, count, int(generator.integers(1, 5)))] = longest
            drawn[0] = longest
    lengths = np.clip(drawn, 1, longest).astype(np.int64)
    end = np.cumsum(lengths)
    kept = lengths[: int(np.searchsorted(end, total)) + 1].copy()
    kept[-1] -= max(int(kept.sum()) - total, 0)
    return kept if name != "giants" else np.asarray(generator.permutation(kept), dtype=np.int64)


def _draw_speeds(generator: np.random.Generator, name: str, n: int) -> Float64Array:
    speed = np.ones(n)
    if name == "any":
        speed = generator.uniform(0.1, 1.0, n)
    elif name == "half slow":
        speed[::2] = generator.uniform(0.1, 1.0)
    elif name == "one slow":
        speed[generator.integers(n)] = 0.1
    return speed


@dataclass(frozen=True)
class Miss:
    """A phase of a plan that is above the promise.

    Attributes:
        over_target_load: busiest server's seconds / the target load.
        seconds_over_bound: busiest server's seconds / the least that any plan takes.
        is_proven: that no plan can keep it.
    """

    kind: str
    phase: Phase
    over_target_load: float
    seconds_over_bound: float
    is_proven: bool

    def __str__(self) -> str:
        proof = "no plan can" if self.is_proven else "DEFECT"
        return (
            f"{self.kind}: {self.phase} {self.over_target_load:.3f}, "
            f"{self.seconds_over_bound:.3f} of the bound: {proof}"
        )


def plan_of(kind: Kind, tolerance: float) -> Plan:
    shape = kind.servers[0].profile.shape
    return balanced.plan(kind.manifest, kind.servers, shape, PlanningOptions(tolerance=tolerance))


def misses_of(kind: Kind, plan: Plan) -> list[Miss]:
    """The phases in which ``plan`` misses the promise, with what the bound says."""
    misses = []
    most = 1 + kind.tolerance + PROMISE
    for phase in Phase:
        forecast = plan.forecast(phase)
        assert forecast is not None
        seconds = forecast.seconds[0]
        over_target_load = float(seconds.max() * kind.speeds.sum() / (seconds @ kind.speeds))
        if over_target_load <= most:
            continue
        lengths = kind.manifest.document_length
        bound = MakespanBound(kind.servers[0].profile, phase, int(lengths.max()))
        over = float(forecast.seconds.max()) / bound.least_seconds(lengths, kind.speeds)
        misses.append(Miss(kind.name, phase, over_target_load, over, over <= most))
    return misses


def dominated(kind: Kind) -> list[str]:
    """Plans of the ladder of tolerances that another of its plans undercuts in both seconds and
    bytes, noticeably in one of them."""
    plans = [plan_of(kind, tolerance) for tolerance in LADDER]
    found = []
    for phase in Phase:
        forecasts = [plan.forecast(phase) for plan in plans]
        seconds = [float(f.seconds.max()) for f in forecasts if f is not None]
        moved = [int((f.bytes_in + f.bytes_out).sum()) for f in forecasts if f is not None]
        for i, mine in enumerate(LADDER):
            for j, other in enumerate(LADDER):
                # Nothing undercuts a plan that moves nothing in bytes.
                fewer = 1 - moved[j] / moved[i] if moved[i] else -float(moved[j])
                gains = 1 - seconds[j] / seconds[i], fewer
                if min(gains) >= 0 and max(gains) > NOTICEABLE and i != j:
                    found.append(
                        f"{kind.name}: {phase} at {mine:g} by {other:g}: {seconds[i]:.6f} s "
                        f"{moved[i]} bytes, {seconds[j]:.6f} s {moved[j]} bytes"
                    )
    return found
