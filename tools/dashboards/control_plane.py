"""Control plane: members and leases, planning, and what was refused."""

from __future__ import annotations

from tools.dashboards.common import (
    HAPPENED,
    JOB,
    NAMESPACE,
    OF_JOB,
    OF_NAMESPACE,
    highest,
    increase,
    quantile,
    rate,
    rising,
    worst,
)
from tools.dashboards.grafana import Dashboard, Panel, Query, Row

_PREFIX = "distca_control_plane"


def _count(title: str, description: str, expr: str, legend: str = "") -> Panel:
    return Panel(
        title=title,
        description=description,
        queries=[Query(expr, legend)],
        kind="stat",
        width=4,
        height=4,
    )


_NOW = Row(
    "Now",
    [
        _count("Jobs", "Open jobs.", f"sum({_PREFIX}_jobs{{{OF_NAMESPACE}}})"),
        _count(
            "Server leases",
            "Of pool servers.",
            f'sum({_PREFIX}_leases{{{OF_NAMESPACE}, kind="server"}})',
        ),
        _count(
            "Rank leases", "Of trainers.", f'sum({_PREFIX}_leases{{{OF_NAMESPACE}, kind="rank"}})'
        ),
        _count(
            "Draining servers",
            "They finish their steps and leave.",
            f'sum({_PREFIX}_servers{{{OF_NAMESPACE}, state="draining"}})',
        ),
        _count(
            "Watching members",
            "Members with an open stream of plans.",
            f"sum({_PREFIX}_subscribers{{{OF_NAMESPACE}}})",
        ),
        _count(
            "Highest epoch",
            "Of the open jobs' plans; 0 until a step is planned again.",
            f"max({_PREFIX}_epoch{{{OF_JOB}}})",
        ),
    ],
)

_PLANNING = Row(
    "Planning",
    [
        Panel(
            title="Plan seconds",
            description="To merge a step's manifests and plan it.",
            queries=[
                Query(quantile(share, f"{_PREFIX}_plan_seconds", OF_NAMESPACE), f"p{share * 100:g}")
                for share in (0.5, 0.95, 0.99)
            ],
            unit="s",
            lowest=0,
        ),
        Panel(
            title="From the last manifest to the published plan",
            description="Planning, and waiting for its turn; it must stay below a step's seconds.",
            queries=[
                Query(
                    quantile(share, f"{_PREFIX}_publish_seconds", OF_NAMESPACE),
                    f"p{share * 100:g}",
                )
                for share in (0.5, 0.95)
            ]
            + [Query(f"min({_PREFIX}_step_seconds{{{OF_JOB}}})", "shortest step")],
            unit="s",
            lowest=0,
        ),
        Panel(
            title="Plans per second",
            description="Made, made again under a higher epoch, and failed.",
            queries=[
                Query(f"sum(rate({_PREFIX}_{name}{{{OF_JOB}}}[$__rate_interval]))", legend)
                for name, legend in (
                    ("steps_planned_total", "planned"),
                    ("replans_total", "replanned"),
                    ("plans_failed_total", "failed"),
                )
            ],
            unit="ops",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Steps that wait",
            description="For manifests of other ranks, and to be planned.",
            queries=[
                Query(
                    f"sum by (job_name) ({_PREFIX}_pending_steps{{{OF_JOB}}})",
                    "{{job_name}} for manifests",
                ),
                Query(
                    f"sum by (job_name) ({_PREFIX}_planning_backlog{{{OF_JOB}}})",
                    "{{job_name}} for planning",
                ),
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Bytes of a plan",
            description="Of all slices together, in the last plan.",
            queries=[Query(worst(f"{_PREFIX}_plan_bytes", OF_JOB, "job_name"), "{{job_name}}")],
            unit="bytes",
            width=8,
            lowest=0,
        ),
    ],
)

_MEMBERS = Row(
    "Members",
    [
        Panel(
            title="Servers",
            description="By kind and state.",
            queries=[
                Query(
                    f"sum by (kind, state) ({_PREFIX}_servers{{{OF_NAMESPACE}}})",
                    "{{kind}} {{state}}",
                )
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Registrations in 15 minutes",
            description="Servers and ranks that joined.",
            queries=[
                Query(
                    increase(f"{_PREFIX}_registrations_total", OF_NAMESPACE, "kind"),
                    "{{kind}}",
                )
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Leases that ran out in 15 minutes",
            description="Members that died, hung or were cut off without leaving.",
            queries=[
                Query(
                    increase(f"{_PREFIX}_lease_expirations_total", OF_NAMESPACE, "kind"),
                    "{{kind}}",
                )
            ],
            width=8,
            lowest=0,
            thresholds=rising(1, 3),
        ),
        Panel(
            title="Failures detected in 15 minutes",
            description="Servers found to have failed, by what showed it; and those fenced.",
            queries=[
                Query(
                    increase(f"{_PREFIX}_failures_detected_total", OF_NAMESPACE, "cause"),
                    "{{cause}}",
                ),
                Query(
                    f"sum(increase({_PREFIX}_servers_fenced_total{{{OF_NAMESPACE}}}[15m]))",
                    "fenced",
                ),
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Jobs closed in 15 minutes",
            description="Finished, or failed.",
            queries=[
                Query(
                    increase(f"{_PREFIX}_jobs_closed_total", OF_NAMESPACE, "outcome"),
                    "{{outcome}}",
                )
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Streams dropped in 15 minutes",
            description="Members that fell behind in reading their plans.",
            queries=[
                Query(
                    increase(f"{_PREFIX}_subscribers_dropped_total", OF_NAMESPACE, "kind"),
                    "{{kind}}",
                )
            ],
            width=8,
            lowest=0,
        ),
    ],
)

_PROCESS = Row(
    "Requests and process",
    [
        Panel(
            title="Refused requests per second",
            description="By method and reason; see docs/security.md for those about access.",
            queries=[
                Query(
                    rate(f"{_PREFIX}_requests_refused_total", OF_NAMESPACE, "method, reason")
                    + " or vector(0)",
                    "{{method}} {{reason}}",
                )
            ],
            lowest=0,
        ),
        Panel(
            title="CPU of the busiest processes",
            description="Cores in use.",
            queries=[
                Query(
                    highest(
                        f"rate(process_cpu_seconds_total{{{OF_NAMESPACE}}}[$__rate_interval])"
                        " and on (job, instance) distca_build_info"
                    ),
                    "{{instance}}",
                )
            ],
            width=6,
            lowest=0,
        ),
        Panel(
            title="Resident memory of the largest processes",
            description="Flat in a steady state.",
            queries=[
                Query(
                    highest(
                        f"process_resident_memory_bytes{{{OF_NAMESPACE}}}"
                        " and on (job, instance) distca_build_info"
                    ),
                    "{{instance}}",
                )
            ],
            unit="bytes",
            width=6,
            lowest=0,
        ),
    ],
)

DASHBOARD = Dashboard(
    name="control-plane",
    title="Control plane",
    description="Members and leases, planning, and what was refused.",
    variables=[NAMESPACE, JOB],
    annotations=HAPPENED,
    rows=[_NOW, _PLANNING, _MEMBERS, _PROCESS],
)
