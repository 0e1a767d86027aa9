"""The figures of a run in words: rows for the table in the terminal and on the HTML page."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distca.apps.report.record import RunRecord, mean_of
from distca.process.plain_text import plain

WARMUP_STEPS = 2
"""First steps left out of the mean speed: they hold first connections and first allocations."""


def summary_rows(record: RunRecord) -> list[tuple[str, str]]:
    """(what, value) in the order in which a reader wants them."""
    rows = [
        ("run", f"{record.name} ({'finished' if record.finished else 'stopped early'})"),
        ("core attention", _mode_in_words(record)),
        ("model", f"{record.model}; {record.parameters:,} parameters, {record.dtype}"),
        (
            "batch",
            f"{record.n_ranks} ranks x {record.tokens_per_rank:,} tokens",
        ),
        ("documents", record.data),
    ]
    if record.steps:
        rows += _step_rows(record)
    if record.verification is not None:
        rows += _verification_rows(record)
    return [(what, plain(value)) for what, value in rows]


def summary_table(record: RunRecord) -> Table:
    """The rows as a table for the terminal."""
    table = Table(title=Text(plain(f"Run {record.name}")), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in summary_rows(record):
        table.add_row(what, Text(value))
    return table


def _mode_in_words(record: RunRecord) -> str:
    n_servers = len(record.detail.servers) if record.detail else 0
    where = {
        "pool": f"on {n_servers} attention nodes",
        "in-place": "in the trainers' own processes",
        "mixed": f"on {n_servers} servers, nodes and trainers",
    }
    return f"{record.mode}: {where[record.mode]}" if n_servers else record.mode


def _step_rows(record: RunRecord) -> list[tuple[str, str]]:
    first, last = record.steps[0], record.steps[-1]
    timed = record.steps[WARMUP_STEPS:] or record.steps
    seconds = sum(step.step_seconds for step in timed)
    waits = [step.wait_seconds for step in timed if step.wait_seconds is not None]
    waited = f", of which {sum(waits) / seconds:.0%} waiting for core attention" if waits else ""
    rows = [
        ("loss", f"{first.loss:.4f} (step {first.step}) to {last.loss:.4f} (step {last.step})"),
        (
            "speed",
            f"{sum(step.tokens for step in timed) / seconds:,.0f} tokens/s, "
            f"{seconds / len(timed):.3f} s a step{waited}",
        ),
    ]
    imbalances = [
        f"{value:.2f} {how}"
        for how, field in (
            ("without planning", "home_imbalance"),
            ("planned", "planned_imbalance"),
            ("measured", "measured_imbalance"),
        )
        if (value := mean_of([getattr(step, field) for step in record.steps])) is not None
    ]
    if imbalances:
        rows.append(("imbalance (mean)", ", ".join(imbalances)))
    plan_seconds = [step.plan_seconds for step in record.steps if step.plan_seconds is not None]
    if plan_seconds:
        typical = statistics.median(plan_seconds)
        rows.append(("planning", f"{typical * 1e3:.1f} ms a step (median)"))
    return rows


def _verification_rows(record: RunRecord) -> list[tuple[str, str]]:
    found = record.verification
    assert found is not None
    if found.steps == 0:
        return [("verified", "no step: this run ended before one that is compared")]
    verdict = "equal to local attention" if found.passed else "DIFFERENT from local attention"
    return [
        ("verified", f"{found.steps} steps: {verdict}"),
        ("  loss", f"{found.loss:.1e} relative at most (allowed {found.loss_tolerance:.0e})"),
        (
            "  gradients",
            f"{found.gradient:.1e} relative at most (allowed {found.gradient_tolerance:.0e}), "
            f"in {found.parameter}",
        ),
    ]


def show_paths(console: Console, **paths: Path | None) -> None:
    """Shows where what a run leaves lies, as far as it is there."""
    for what, path in paths.items():
        if path is not None and path.exists():
            line = plain(f"{what}: {path}")
            console.print(line, soft_wrap=True, highlight=False, markup=False)
