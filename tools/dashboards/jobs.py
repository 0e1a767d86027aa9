"""Jobs: progress, balance and waits of each, rank by rank, and what failures cost."""

from __future__ import annotations

from tools.dashboards.common import (
    HAPPENED,
    JOB,
    NAMESPACE,
    OF_JOB,
    ends,
    highest,
    increase,
    mean,
    quantile,
    rate,
    worst,
)
from tools.dashboards.grafana import Dashboard, Panel, Query, Row

_CONTROL_PLANE = "distca_control_plane"
_TRAINER = "distca_trainer"


def _of_job(name: str, legend: str = "{{job_name}}", by: str = "job_name") -> Query:
    return Query(worst(f"{_CONTROL_PLANE}_{name}", OF_JOB, by), legend)


_PROGRESS = Row(
    "Progress",
    [
        Panel(
            title="Tokens per second",
            description="Of the steps that all ranks have finished.",
            queries=[
                Query(rate(f"{_CONTROL_PLANE}_tokens_total", OF_JOB, "job_name"), "{{job_name}}")
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Steps per minute",
            description="That all ranks have finished.",
            queries=[
                Query(
                    f"60 * {rate(f'{_CONTROL_PLANE}_steps_finished_total', OF_JOB, 'job_name')}",
                    "{{job_name}}",
                )
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Tokens of a step",
            description="Of all ranks, in the last step that all have finished.",
            queries=[_of_job("step_tokens")],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Ranks",
            description="Joined and expected; a job waits until all have joined.",
            queries=[_of_job("job_ranks", "{{job_name}} {{state}}", "job_name, state")],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Step seconds",
            description="Of the slowest rank, and of them, how long the rank that waited longest "
            "had nothing else to compute.",
            queries=[
                _of_job("step_seconds", "{{job_name}} step"),
                _of_job("wait_seconds", "{{job_name}} waits"),
            ],
            unit="s",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Step seconds by rank, slowest and fastest, in the mean",
            description="A rank that stands out is slow itself: core attention is shared by all.",
            queries=[
                Query(
                    ends(mean(f"{_TRAINER}_step_seconds", OF_JOB, "job_name, rank")),
                    "{{job_name}} rank {{rank}}",
                )
            ],
            unit="s",
            width=8,
            lowest=0,
        ),
    ],
)

_BALANCE = Row(
    "Balance",
    [
        Panel(
            title="Imbalance by phase",
            description="Max over mean busy seconds: at home, as planned, as measured.",
            queries=[
                _of_job(
                    f"{kind}_imbalance_ratio",
                    f"{{{{job_name}}}} {{{{phase}}}} {kind}",
                    "job_name, phase",
                )
                for kind in ("home", "predicted", "measured")
            ],
            lowest=1,
            decimals=2,
        ),
        Panel(
            title="Tolerance in force",
            description="By how much the busiest server may exceed the mean: eps.",
            queries=[_of_job("tolerance_ratio")],
            unit="percentunit",
            width=6,
            lowest=0,
        ),
        Panel(
            title="Predicted over measured seconds",
            description="1 is exact; below 1 servers are slower than planned.",
            queries=[
                _of_job(
                    "predicted_over_measured_ratio", "{{job_name}} {{phase}}", "job_name, phase"
                )
            ],
            width=6,
            lowest=0,
            decimals=2,
        ),
        Panel(
            title="CA-tasks per second, by transport",
            description="Of the job's queries; over transport none they stay in their process.",
            queries=[
                Query(
                    rate(f"{_TRAINER}_tasks_total", OF_JOB, "phase, transport"),
                    "{{phase}} ({{transport}})",
                )
            ],
            unit="ops",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Rows given to servers per second",
            description="Those over transport none stay in their process.",
            queries=[
                Query(
                    rate(f"{_TRAINER}_rows_total", OF_JOB, "kind, transport"),
                    "{{kind}} ({{transport}})",
                )
            ],
            unit="ops",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Bytes moved in a layer",
            description="Between processes, both ways, as the last plan predicts.",
            queries=[_of_job("predicted_moved_bytes", "{{job_name}} {{phase}}", "job_name, phase")],
            unit="bytes",
            width=8,
            lowest=0,
        ),
    ],
)

_WAITS = Row(
    "Waits",
    [
        Panel(
            title="What the step's time is lost to, by rank, the most",
            description="Seconds per second: waiting for results, sending, waiting for the plan.",
            queries=[
                Query(
                    highest(
                        rate(
                            f"{_TRAINER}_step_part_seconds_total",
                            f'{OF_JOB}, part!="compute"',
                            "job_name, rank, part",
                        )
                    ),
                    "{{job_name}} rank {{rank}} {{part}}",
                )
            ],
            unit="percentunit",
            lowest=0,
        ),
        Panel(
            title="Communication hidden, by rank, the least and the most",
            description="Share of the ticks' time in which the rank computed something else.",
            queries=[
                Query(
                    ends(
                        rate(
                            f"{_TRAINER}_communication_seconds_total",
                            f'{OF_JOB}, visibility="hidden"',
                            "job_name, rank",
                        )
                        + " / "
                        + rate(f"{_TRAINER}_communication_seconds_total", OF_JOB, "job_name, rank")
                    ),
                    "{{job_name}} rank {{rank}}",
                )
            ],
            unit="percentunit",
            lowest=0,
            highest=1,
        ),
        Panel(
            title="Tick seconds",
            description="Median and 95th percentile, from the requests' sending to the last reply.",
            queries=[
                Query(
                    quantile(share, f"{_TRAINER}_tick_seconds", OF_JOB, "phase"),
                    f"{{{{phase}}}} p{share * 100:g}",
                )
                for share in (0.5, 0.95)
            ],
            unit="s",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Exposed seconds of a tick (95th percentile)",
            description="How long a rank has nothing else to compute in a slow tick.",
            queries=[
                Query(
                    quantile(0.95, f"{_TRAINER}_tick_exposed_seconds", OF_JOB, "phase"),
                    "{{phase}}",
                )
            ],
            unit="s",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Waiting for the plan (95th percentile)",
            description="Plans should be there before they are needed; a first step always waits.",
            queries=[
                Query(
                    quantile(0.95, f"{_TRAINER}_plan_wait_seconds", OF_JOB, "job_name"),
                    "{{job_name}}",
                )
            ],
            unit="s",
            width=8,
            lowest=0,
        ),
    ],
)

_FAILURES = Row(
    "Failures",
    [
        Panel(
            title="Replayed ticks in 5 minutes",
            description="Run again because their server was lost: on another server, or at home.",
            queries=[
                Query(
                    increase(f"{_TRAINER}_replayed_ticks_total", OF_JOB, "job_name, where", "5m"),
                    "{{job_name}} {{where}}",
                )
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Recovery seconds (95th percentile)",
            description="From noticing a lost server to the end of the replay. Empty without one.",
            queries=[
                Query(
                    quantile(0.95, f"{_TRAINER}_recovery_seconds", OF_JOB, "job_name"),
                    "{{job_name}}",
                )
            ],
            unit="s",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Epoch",
            description="Highest of the job's plans; each replan raises it.",
            queries=[_of_job("epoch")],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Steps given up in 5 minutes",
            description="That did not run to their end.",
            queries=[
                Query(
                    increase(
                        f"{_TRAINER}_steps_total", f'{OF_JOB}, outcome="given_up"', "job_name", "5m"
                    ),
                    "{{job_name}}",
                )
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Stale and wrong results in 5 minutes",
            description="Late results of an earlier epoch are dropped, as they should be; a wrong "
            "result is never harmless.",
            queries=[
                Query(
                    f"sum by (job_name) (increase({_TRAINER}_stale_results_total{{{OF_JOB}}}[5m]))",
                    "{{job_name}} stale",
                ),
                Query(
                    increase(f"{_TRAINER}_corrupt_results_total", OF_JOB, "job_name, kind", "5m"),
                    "{{job_name}} wrong: {{kind}}",
                ),
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Audited CA-tasks per second",
            description="Recomputed at home: equal, or different.",
            queries=[
                Query(
                    rate(f"{_TRAINER}_audited_tasks_total", OF_JOB, "job_name, result"),
                    "{{job_name}} {{result}}",
                )
            ],
            unit="ops",
            width=8,
            lowest=0,
        ),
    ],
)

DASHBOARD = Dashboard(
    name="jobs",
    title="Jobs",
    description="Progress, balance and waits of each job, and what failures cost it.",
    variables=[NAMESPACE, JOB],
    annotations=HAPPENED,
    rows=[_PROGRESS, _BALANCE, _WAITS, _FAILURES],
)
