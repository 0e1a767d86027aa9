"""The plan: which server computes which CA-task, so that all of them finish together.

    cap = (1 + tolerance) * mean load,    imbalance = max load / mean load <= 1 + tolerance

Every task begins on its home. While a server is above the cap, the busiest gives the idlest one a
part of a document: as much as the one has too much or the other has room for, and of all such parts
the one that moves most seconds for a byte. Down to the cap, not to the mean, which
moves fewer bytes. A pure function of its arguments, so every process makes the same plan by itself.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from examples.nano_distca.documents import NanoBatch
from examples.nano_distca.tasks import Cost, Task, tasks_at_home


@dataclass(frozen=True)
class Plan:
    """The tasks of each server, their predicted seconds, and why planning stopped."""

    tasks: tuple[tuple[Task, ...], ...]
    loads: tuple[float, ...]
    reason: str


def imbalance(loads: tuple[float, ...]) -> float:
    """1.0 is perfect; also of nothing at all."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def home_plan(batch: NanoBatch, cost: Cost) -> Plan:
    """Without disaggregation: each rank computes its own rows."""
    tasks = [[t for t in tasks_at_home(batch) if t.home == r] for r in range(batch.n_ranks)]
    return _finished(tasks, cost, "everything at home")


def make_plan(
    batch: NanoBatch, n_servers: int, cost: Cost, tolerance: float = 0.05, grain: int = 16
) -> Plan:
    """Balances a nano-batch.

    The ranks are the first servers; the others begin with nothing. Documents are cut at multiples
    of ``grain``.
    """
    tasks: list[list[Task]] = [[] for _ in range(n_servers)]
    for task in tasks_at_home(batch):
        tasks[task.home].append(task)
    loads = [sum(map(cost.seconds, each)) for each in tasks]
    cap = (1 + tolerance) * sum(loads) / n_servers
    while max(loads) > cap:
        busiest, idlest = loads.index(max(loads)), loads.index(min(loads))
        wanted = min(loads[busiest] - cap, cap - loads[idlest])
        parts = [
            (cost.seconds(part) / _bytes(part, idlest, tasks[idlest], batch, cost), part, task)
            for task in tasks[busiest]
            for part in _parts(task, wanted, cost, grain)
            if loads[idlest] + cost.seconds(part) < loads[busiest]
        ]
        if not parts:
            return _finished(tasks, cost, f"missed: {grain} queries are too much to move")
        _, part, task = max(parts)
        tasks[busiest] += task.cut(part.q_begin, part.q_end)[1]
        tasks[busiest].remove(task)
        tasks[idlest].append(part)
        for server in (busiest, idlest):
            loads[server] = sum(map(cost.seconds, tasks[server]))
    return _finished(tasks, cost, f"kept: no server is more than {tolerance:.0%} above the mean")


def _parts(task: Task, wanted: float, cost: Cost, grain: int) -> Iterator[Task]:
    """Parts of about ``wanted`` seconds: all of it, its end, the cheapest one by the formula."""
    if cost.seconds(task) <= wanted:
        yield task
        return
    pairs = max(wanted - cost.launch, 0) / cost.seconds_per_pair
    for end in {task.q_end, grain * round(cost.best_end(pairs) / grain)}:
        begin = grain * round(math.sqrt(max(end**2 - 2 * pairs, 0)) / grain)
        begin = max(task.q_begin, min(begin, grain * math.ceil(end / grain - 1)))
        if task.q_begin <= begin < end <= task.q_end:
            yield task.cut(begin, end)[0]


def _bytes(part: Task, server: int, tasks: list[Task], batch: NanoBatch, cost: Cost) -> int:
    """Bytes that ``part`` adds to what travels for the server: at least one."""
    reached = max((t.q_end for t in tasks if t.document == part.document), default=0)
    own = batch.rows(server) if server < batch.n_ranks else slice(0)
    keys = range(*(batch.first[part.document] + each for each in (reached, part.q_end)))
    at_hand = range(max(keys.start, own.start or 0), min(keys.stop, own.stop))
    queries = (part.q_end - part.q_begin) * (part.home != server)
    new_keys = len(keys) - len(at_hand)
    return max(1, queries * cost.shape.query_bytes + new_keys * cost.shape.key_bytes)


def _finished(tasks: list[list[Task]], cost: Cost, reason: str) -> Plan:
    whole = tuple(tuple(sorted(each)) for each in tasks)
    return Plan(whole, tuple(sum(map(cost.seconds, each)) for each in whole), reason)
