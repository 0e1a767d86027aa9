"""Tables of what the pipeline benchmark measured; from its JSON, so old runs can be shown again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.training.pipeline_ways import Way, way_of

BASELINES = ("even", "drawn")
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}
NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative. Ways add up in other orders: hundreds of roundings of 2^-24 or of 2^-9, most of which
cancel in a mean over all tokens; a norm has the gradients' own roundings as well."""

Case = dict[str, Any]


def show(plan: dict[str, Any], cases: Sequence[Case], title: str) -> None:
    """Prints all tables, of each number of microbatches."""
    console = Console(width=170)
    for n in plan["microbatches"]:
        its = [case for case in cases if case["microbatches"] == n]
        measured = [case for case in its if case["steps"]]
        for case in its:
            if case.get("why"):
                console.print(f"m = {n}, {case['way']}: {case['state']}: {case['why']}")
        if not measured:
            continue
        name = f"{title}, m = {n}"
        console.print(_steps_table(measured, name))
        console.print(_forecast_table(plan, measured, f"{name}: forecast and measured"))
        console.print(_ranks_table(measured, f"{name}: ranks"))
        served = [case for case in measured if way_of(case["way"]).served]
        if served:
            console.print(_served_table(served, f"{name}: DistCA"))
    wrong = disagreements(plan, cases)
    for line in wrong or ["losses and gradients' norms of all ways agree on every batch"]:
        console.print(line)


def disagreements(plan: dict[str, Any], cases: Iterable[Case]) -> list[str]:
    """Ways whose loss in a step, or gradients' norm, differs from the first way's on the same
    batch, in words."""
    dtype = plan["model"]["dtype"]
    first: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {}
    wrong = []
    for case in cases:
        for step in case["steps"]:
            key = case["microbatches"], step["seed"]
            name, expected = first.setdefault(key, (case["way"], step))
            for what, tolerance in (("loss", LOSS_TOLERANCE), ("norm", NORM_TOLERANCE)):
                apart = abs(step[what] / expected[what] - 1)
                if not apart <= tolerance[dtype]:
                    wrong.append(
                        f"m = {key[0]}, batch {key[1]}: {case['way']} has a {what} of "
                        f"{step[what]:.6f}, {name} {expected[what]:.6f}: {apart:.1e} apart, "
                        f"allowed {tolerance[dtype]:.0e}"
                    )
    return wrong


def bubble(step: dict[str, Any]) -> list[float]:
    """By rank, the share of a step in which its stages run nothing."""
    return [
        1 - sum(end - begin for *_, begin, end in rank["actions"]) / step["seconds"]
        for rank in step["ranks"]
    ]


def compute_seconds(step: dict[str, Any], n_microbatches: int) -> tuple[float, float]:
    """(l, a) of a step with attention at home: seconds of one microbatch on one rank, forward and
    backward, beside core attention and of it; in the mean of microbatches and ranks."""
    busy = np.mean([sum(e - b for *_, b, e in rank["actions"]) for rank in step["ranks"]])
    attention = np.mean([rank["attention_seconds"] for rank in step["ranks"]])
    return float(busy - attention) / n_microbatches, float(attention) / n_microbatches


def forecasts(
    plan: dict[str, Any], cases: Sequence[Case], way: Way, n_microbatches: int
) -> dict[int, float]:
    """By seed, what a step of ``way`` takes by its formula, with l and a as the first of BASELINES
    measured them; empty without."""
    measured = _baseline(cases, BASELINES)
    if measured is None:
        return {}
    formula = idle_aware if way.served else one_f_one_b
    return {
        step["seed"]: formula(
            plan["stages"], n_microbatches, *compute_seconds(step, n_microbatches)
        )
        for step in measured["steps"]
    }


def ratios(case: Case, baseline: Case | None) -> list[float]:
    """By batch, how many times as long the baseline takes; of the batches that both have."""
    if baseline is None:
        return []
    seconds = {step["seed"]: step["seconds"] for step in baseline["steps"]}
    return [
        seconds[step["seed"]] / step["seconds"] for step in case["steps"] if step["seed"] in seconds
    ]


def _baseline(cases: Sequence[Case], names: Sequence[str]) -> Case | None:
    return next((case for name in names for case in cases if case["way"] == name), None)


def _steps_table(cases: Sequence[Case], title: str) -> Table:
    table = _table(
        title, "way", "step s by batch", "tokens/s", "over even by batch", "mean",
        "over drawn by batch", "mean", "bubble", "largest / mean squares", "loss apart",
    )  # fmt: skip
    even, drawn = (_baseline(cases, [name]) for name in ("even", "drawn"))
    for case in cases:
        steps = case["steps"]
        over = [ratios(case, even), ratios(case, drawn)]
        table.add_row(
            case["way"],
            _by_batch((step["seconds"] for step in steps), 2),
            f"{np.mean([step['tokens_per_second'] for step in steps]):,.0f}",
            _by_batch(over[0], 3),
            _mean(over[0]),
            _by_batch(over[1], 3),
            _mean(over[1]),
            f"{np.mean([bubble(step) for step in steps]):.1%}",
            _by_batch((step["unevenness"] for step in steps), 2),
            _apart(case, cases[0]),
        )
    return table


def _apart(case: Case, first: Case) -> str:
    losses = {step["seed"]: step["loss"] for step in first["steps"]}
    apart = [
        abs(step["loss"] / losses[step["seed"]] - 1)
        for step in case["steps"]
        if step["seed"] in losses
    ]
    return f"{max(apart):.0e}" if apart else ""


def _forecast_table(plan: dict[str, Any], cases: Sequence[Case], title: str) -> Table:
    n = cases[0]["microbatches"]
    measured = _baseline(cases, BASELINES)
    if measured is not None:
        found = [compute_seconds(step, n) for step in measured["steps"]]
        title += (
            f"\nl = {_by_batch((each[0] for each in found), 3)} s, "
            f"a = {_by_batch((each[1] for each in found), 3)} s a microbatch and stage, by batch, "
            f"as {measured['way']} has them"
        )
    even = _baseline(cases, ["even"])
    perfect = forecasts(plan, cases, way_of("even"), n)
    table = _table(
        title, "way", "forecast s", "measured s", "forecast / measured", "mean",
        "forecast over perfect 1F1B", "measured over even / that", "mean",
    )  # fmt: skip
    for case in cases:
        forecast = forecasts(plan, cases, way_of(case["way"]), n)
        steps = [step for step in case["steps"] if step["seed"] in forecast]
        share = [forecast[step["seed"]] / step["seconds"] for step in steps]
        gains = [perfect[step["seed"]] / forecast[step["seed"]] for step in steps]
        reached = [r / gain for r, gain in zip(ratios(case, even), gains, strict=False)]
        table.add_row(
            case["way"],
            _by_batch((forecast[step["seed"]] for step in steps), 2),
            _by_batch((step["seconds"] for step in steps), 2),
            _by_batch(share, 3),
            _mean(share),
            _by_batch(gains, 3),
            _by_batch(reached, 3),
            _mean(reached),
        )
    return table


def _ranks_table(cases: Sequence[Case], title: str) -> Table:
    table = _table(
        title, "way", "microbatches in flight", "peak allocated GiB", "over even's",
        "message buffers GiB", "device GiB",
        "bubble by rank", "joined in s",
    )  # fmt: skip
    base = _baseline(cases, BASELINES)
    for case in cases:
        peak, buffers, device = (
            _memory(case, name) for name in ("allocated_gib", "buffers_gib", "device_gib")
        )
        over = [] if base is None else _memory(base, "allocated_gib")
        table.add_row(
            case["way"],
            _by_batch(case.get("in_flight", []), 1),
            _by_batch(peak, 1),
            _by_batch((p / o for p, o in zip(peak, over, strict=False)), 3),
            _by_batch(buffers, 1),
            _by_batch(device, 1),
            _by_batch(np.mean([bubble(step) for step in case["steps"]], axis=0), 3),
            f"{case.get('prepare_seconds', 0):.0f}",
        )
    return table


def _memory(case: Case, name: str) -> list[float]:
    """By rank, the most of all steps; empty where there is no such figure."""
    found = [[rank["memory"].get(name) for rank in step["ranks"]] for step in case["steps"]]
    return [] if found[0][0] is None else np.max(np.array(found, dtype=float), axis=0).tolist()


def _served_table(cases: Sequence[Case], title: str) -> Table:
    table = _table(
        title, "way", "slots over their levels, planned", "measured", "worst slot", "exposed",
        "plan ms", "waited for plan ms", "sent GB a rank",
    )  # fmt: skip
    for case in cases:
        steps = [step for step in case["steps"] if step["slots"]]
        told = [rank["served"] for step in case["steps"] for rank in step["ranks"]]
        measured = [step["slots"] for step in steps if "measured" in step["slots"]]
        table.add_row(
            case["way"],
            _by_batch((step["slots"]["predicted_step"] for step in steps), 3),
            _by_batch((slots["measured_step"] for slots in measured), 3),
            _by_batch((max(slots["measured"]) for slots in measured), 2),
            " ".join(map(_exposed, case["steps"])),
            _by_batch((1e3 * step["slots"]["plan_seconds"] for step in steps), 1),
            f"{1e3 * max(rank['plan_wait_seconds'] for rank in told):.1f}",
            f"{np.mean([rank['sent_bytes'] for rank in told]) / 1e9:.1f}",
        )
    return table


def _exposed(step: dict[str, Any]) -> str:
    """The share of a step in which a rank, in the mean, waited for core attention alone."""
    seconds = [rank["served"]["exposed_seconds"] for rank in step["ranks"]]
    if None in seconds:
        return "?"
    return f"{np.mean(seconds) / step['seconds']:.1%}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "way" else "right")
    return table


def _by_batch(values: Iterable[float], digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f}" if len(values) else ""


# By the formulas: p stages alike, m microbatches, transport free; l and a are seconds of one in a
# stage of everything but core attention and of core attention. In tick k n(k) stages are active.


def active_stages(n_stages: int, n_microbatches: int) -> list[int]:
    """Of each tick."""
    n_ticks = n_microbatches + n_stages - 1
    return [min(k + 1, n_stages, n_microbatches, n_ticks - k) for k in range(n_ticks)]


def one_f_one_b(n_stages: int, n_microbatches: int, linear: float, attention: float) -> float:
    """1F1B whose microbatches all take equally long."""
    return (n_microbatches + n_stages - 1) * (linear + attention)


def idle_aware(n_stages: int, n_microbatches: int, linear: float, attention: float) -> float:
    """Attention of a tick spread over all ranks, idle ones taking more: max(l, n (l + a) / p)."""
    ticks = active_stages(n_stages, n_microbatches)
    return sum(max(linear, n * (linear + attention) / n_stages) for n in ticks)
