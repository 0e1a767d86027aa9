"""Pipeline schedules side by side: each without disaggregation, and with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core_attention.arrays import Int64Array
from core_attention.errors import ScheduleError
from core_attention.schedule_orders import SCHEDULES, Order, one_f_one_b
from distca.apps.simulator.baselines import balanced_seconds, plain_packing, repacked
from distca.apps.simulator.disaggregated import (
    DisaggregatedStep,
    Method,
    disaggregated_step,
    mean,
    mean_step,
)
from distca.apps.simulator.packing import as_trained
from distca.apps.simulator.setup import Setup, stage_layers
from distca.apps.simulator.verdict import (
    EXPOSED_TOO_MUCH,
    WORTH_MENTIONING,
    Judgement,
    Remedy,
    Worth,
    shorter_wait,
)

EVEN, IDLE_AWARE = "even", "idle-aware"


@dataclass(frozen=True, kw_only=True)
class ScheduleTimes:
    """Mean step seconds of one schedule over batches.

    Attributes:
        name: of the schedule.
        in_flight: most microbatches whose activations a rank keeps.
        plain_seconds: documents as they come.
        repacked_seconds: whole documents arranged so that microbatches take equal time.
        balanced_seconds: perfectly equal microbatches.
        pooled: with disaggregation, by how attention is spread: ``EVEN`` or ``IDLE_AWARE``.
    """

    name: str
    in_flight: float
    plain_seconds: float
    repacked_seconds: float
    balanced_seconds: float
    pooled: Mapping[str, DisaggregatedStep]


@dataclass(frozen=True, kw_only=True)
class ScheduleComparison:
    """All schedules of one job.

    Attributes:
        n_gpus: of the job.
        times: by schedule.
        balanced_1f1b_seconds: 1F1B with perfectly equal microbatches.
        plain_1f1b_seconds: 1F1B with documents as they come.
        in_flight_limit: most microbatches that memory allows.
        left_out: why schedules are missing, a sentence each.
    """

    n_gpus: int
    times: Sequence[ScheduleTimes]
    balanced_1f1b_seconds: float
    plain_1f1b_seconds: float
    in_flight_limit: float
    left_out: Sequence[str] = ()


def compare_schedules(
    setup: Setup,
    batches: Sequence[Int64Array],
    method: Method,
    orders: Mapping[str, Order],
    in_flight_limit: float | None = None,
    left_out: Sequence[str] = (),
) -> ScheduleComparison:
    """Simulates every schedule on every batch.

    Args:
        setup: what is simulated, with 1 or more stages.
        batches: documents of each step; 1 or more.
        method: planner, homes and nano-batches; its schedule does not count.
        orders: the schedules, by name.
        in_flight_limit: most microbatches whose activations a rank may keep; None for as many as
            1F1B keeps.
        left_out: why schedules are missing; copied into the result.
    """
    if not batches:
        raise ValueError("no batches to simulate; give 1 or more")
    if in_flight_limit is not None and not in_flight_limit >= 1:
        raise ValueError(f"in_flight is {in_flight_limit}; it must be 1 or more microbatches")
    batches = [
        as_trained(batch, setup.n_pipelines, setup.tokens_per_rank, method.n_nano_batches)
        for batch in batches
    ]
    return ScheduleComparison(
        n_gpus=setup.cluster.n_gpus,
        times=[_times(setup, batches, method, name, order) for name, order in orders.items()],
        balanced_1f1b_seconds=mean(balanced_seconds(setup, batch) for batch in batches),
        plain_1f1b_seconds=mean(plain_packing(setup, batch) for batch in batches),
        in_flight_limit=in_flight_limit or _one_f_one_b_in_flight(setup),
        left_out=left_out,
    )


def fitting_orders(setup: Setup) -> tuple[dict[str, Order], list[str]]:
    """The named schedules that can run ``setup``, and why the others cannot."""
    orders, left_out = {}, []
    for name, order in SCHEDULES.items():
        try:
            stage_layers(setup, order(setup.n_stages, setup.n_microbatches))
        except (ValueError, ScheduleError) as error:
            left_out.append(str(error))
        else:
            orders[name] = order
    return orders, left_out


def _one_f_one_b_in_flight(setup: Setup) -> float:
    return one_f_one_b(setup.n_stages, setup.n_microbatches).peak_in_flight


def _times(
    setup: Setup, batches: Sequence[Int64Array], method: Method, name: str, order: Order
) -> ScheduleTimes:
    def pooled(*, idle_aware: bool) -> DisaggregatedStep:
        own = replace(method, schedule=order, idle_aware=idle_aware)
        return mean_step([disaggregated_step(setup, batch, own) for batch in batches])

    return ScheduleTimes(
        name=name,
        in_flight=order(setup.n_stages, setup.n_microbatches).peak_in_flight,
        plain_seconds=mean(plain_packing(setup, batch, order) for batch in batches),
        repacked_seconds=mean(repacked(setup, batch, order) for batch in batches),
        balanced_seconds=mean(balanced_seconds(setup, batch, order) for batch in batches),
        pooled={EVEN: pooled(idle_aware=False), IDLE_AWARE: pooled(idle_aware=True)},
    )


def judge_schedules(
    comparison: ScheduleComparison, remedies: Sequence[Remedy] = tuple(Remedy)
) -> Judgement:
    """The verdict on schedules for that many GPUs, and on disaggregation against the strongest one
    without it; both within the limit on microbatches in flight.

    Args:
        comparison: what is judged.
        remedies: those that are not in use yet.
    """
    verdict = _judge(comparison, remedies)
    return replace(verdict, text=f"On {comparison.n_gpus} GPUs: {verdict.text}")


def _judge(comparison: ScheduleComparison, remedies: Sequence[Remedy]) -> Judgement:
    limit = comparison.in_flight_limit
    fits = [times for times in comparison.times if times.in_flight <= limit]
    if not fits:
        least = min(comparison.times, key=lambda times: times.in_flight)
        return Judgement(
            Worth.NOTHING_TO_GAIN,
            f"No schedule keeps at most {limit:g} microbatches in flight; {least.name} keeps the "
            f"fewest, {least.in_flight:g}. Allow more (--in-flight), or use fewer stages.",
        )
    packings = {
        f"{times.name}, {packing}": seconds
        for times in fits
        for packing, seconds in (
            ("plain packing", times.plain_seconds),
            ("re-packed", times.repacked_seconds),
        )
    }
    rival = min(packings, key=packings.__getitem__)
    chosen, spread = _fastest(fits)
    best = chosen.pooled[spread]
    gain = packings[rival] / best.seconds
    against = (
        f"{gain:.2f}x the speed of the strongest schedule without CAD ({rival}), "
        f"{comparison.plain_1f1b_seconds / best.seconds:.2f}x that of 1F1B with documents as they "
        f"come and {comparison.balanced_1f1b_seconds / best.seconds:.2f}x that of 1F1B with "
        "perfectly equal microbatches."
    )
    waits = best.exposed_seconds / best.seconds
    links = f"{waits:.0%} of the step waits for links. {shorter_wait(remedies)}"
    if gain < WORTH_MENTIONING:
        could_gain = packings[rival] / _unexposed_seconds(fits) >= WORTH_MENTIONING
        if could_gain and waits > WORTH_MENTIONING - 1:
            return Judgement(
                Worth.LINKS_TOO_SLOW,
                f"The links hold CAD back with these pipelines: at best {against} {links} With "
                f"these links, run {rival}.",
            )
        text = f"Nothing to gain from CAD with these pipelines: at best {against}"
        return Judgement(Worth.NOTHING_TO_GAIN, f"{text} Run {rival}.")
    run = (
        f"Run schedule {chosen.name} with {spread} plans: {against} It keeps up to "
        f"{chosen.in_flight:g} microbatches in flight of {limit:g} allowed."
    )
    faster, other_spread = _fastest(comparison.times)
    other = faster.pooled[other_spread]
    if best.seconds / other.seconds >= WORTH_MENTIONING:
        run += (
            f" With room for {faster.in_flight:g}, {faster.name} with {other_spread} plans would "
            f"be {best.seconds / other.seconds:.2f}x faster."
        )
    if waits > EXPOSED_TOO_MUCH:
        return Judgement(Worth.LINKS_TOO_SLOW, f"{run} {links}")
    return Judgement(Worth.GAIN, run)


def _fastest(times: Sequence[ScheduleTimes]) -> tuple[ScheduleTimes, str]:
    """The fastest schedule with disaggregation, and how its attention is spread."""
    choices = [(own, spread) for own in times for spread in own.pooled]
    return min(choices, key=lambda choice: choice[0].pooled[choice[1]].seconds)


def _unexposed_seconds(times: Sequence[ScheduleTimes]) -> float:
    """The fastest step with disaggregation if nothing waited for communication."""
    steps = [step for own in times for step in own.pooled.values()]
    return min(step.seconds - step.exposed_seconds for step in steps)
