"""Overview: is it balanced, is communication hidden, what limits the step?"""

from __future__ import annotations

from tools.dashboards.common import (
    HAPPENED,
    JOB,
    NAMESPACE,
    OF_JOB,
    OF_NAMESPACE,
    ends,
    falling,
    highest,
    rate,
    rising,
    worst,
)
from tools.dashboards.grafana import Dashboard, Panel, Query, Row

_PARTS = "distca_trainer_step_part_seconds_total"
_COMMUNICATION = "distca_trainer_communication_seconds_total"

_NOW = Row(
    "Now",
    [
        Panel(
            title="Tokens per second",
            description="Of the steps that all ranks have finished.",
            queries=[Query(f"sum(rate(distca_control_plane_tokens_total{{{OF_JOB}}}[5m]))")],
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            title="Measured imbalance",
            description="Busiest server over the mean, worst job and phase; 1.00 is perfect.",
            queries=[Query(f"max(distca_control_plane_measured_imbalance_ratio{{{OF_JOB}}})")],
            kind="stat",
            width=4,
            height=4,
            decimals=2,
            thresholds=rising(1.1, 1.25),
        ),
        Panel(
            title="Imbalance without DistCA",
            description="What the same packing would give if every rank kept its own attention.",
            queries=[Query(f"max(distca_control_plane_home_imbalance_ratio{{{OF_JOB}}})")],
            kind="stat",
            width=4,
            height=4,
            decimals=2,
        ),
        Panel(
            title="Communication hidden",
            description="Share of the ticks' time in which the ranks computed something else.",
            queries=[
                Query(
                    f'sum(rate({_COMMUNICATION}{{{OF_JOB}, visibility="hidden"}}[5m]))'
                    f" / sum(rate({_COMMUNICATION}{{{OF_JOB}}}[5m]))"
                )
            ],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            thresholds=falling(0.7, 0.9),
        ),
        Panel(
            title="Step waits for core attention",
            description="Share of the steps' time in which the ranks had nothing else to compute.",
            queries=[
                Query(
                    f'sum(rate({_PARTS}{{{OF_JOB}, part="wait"}}[5m]))'
                    f" / sum(rate({_PARTS}{{{OF_JOB}}}[5m]))"
                )
            ],
            unit="percentunit",
            kind="stat",
            width=4,
            height=4,
            thresholds=rising(0.05, 0.15),
        ),
        Panel(
            title="Servers",
            description="Live attention servers that take work, pool and in-place.",
            queries=[
                Query(
                    f'sum(distca_control_plane_servers{{{OF_NAMESPACE}, state="serving"}})',
                    "serving",
                )
            ],
            kind="stat",
            width=4,
            height=4,
        ),
    ],
)

_BALANCE = Row(
    "Is core attention balanced?",
    [
        Panel(
            title="Imbalance by job",
            description="Max over mean busy seconds. Home: if nothing moved. Predicted: by the "
            "plan. Measured: by the servers; it should lie on predicted, and that below the limit.",
            queries=[
                Query(
                    worst("distca_control_plane_home_imbalance_ratio", OF_JOB, "job_name"),
                    "{{job_name}} home",
                ),
                Query(
                    worst("distca_control_plane_predicted_imbalance_ratio", OF_JOB, "job_name"),
                    "{{job_name}} predicted",
                ),
                Query(
                    worst("distca_control_plane_measured_imbalance_ratio", OF_JOB, "job_name"),
                    "{{job_name}} measured",
                ),
                Query(
                    worst("distca_control_plane_tolerance_ratio", OF_JOB, "job_name") + " + 1",
                    "{{job_name}} limit",
                ),
            ],
            lowest=1,
            decimals=2,
        ),
        Panel(
            title="Share of time in kernels, busiest and idlest servers",
            description="Lines that lie together are a balanced pool; a gap below 1 is idle time.",
            queries=[
                Query(
                    ends(rate("distca_attention_node_busy_seconds_total", OF_NAMESPACE, "server")),
                    "{{server}}",
                )
            ],
            unit="percentunit",
            lowest=0,
            highest=1,
        ),
    ],
)

_COMMUNICATION_ROW = Row(
    "Is communication hidden?",
    [
        Panel(
            title="Ticks under way, hidden and exposed",
            description="Seconds of ticks per second, all ranks. Exposed ones lengthen the step.",
            queries=[
                Query(rate(_COMMUNICATION, OF_JOB, "phase, visibility"), "{{phase}} {{visibility}}")
            ],
            unit="s",
            stacked=True,
            lowest=0,
        ),
        Panel(
            title="Bytes sent per second, busiest processes",
            description="Rows on their way between ranks and servers.",
            queries=[
                Query(
                    highest(rate("distca_data_plane_sent_bytes_total", OF_NAMESPACE, "instance")),
                    "{{instance}}",
                )
            ],
            unit="Bps",
            lowest=0,
        ),
    ],
)

_LIMITS = Row(
    "What limits the step?",
    [
        Panel(
            title="Where the step's time goes",
            description="Compute is the trainer's own work; send is packing; wait is having "
            "nothing to compute but what waits for core attention (servers too slow, out of "
            "balance, or the network); plan is waiting for the control plane.",
            queries=[
                Query(
                    f"sum by (part) (rate({_PARTS}{{{OF_JOB}}}[$__rate_interval])) "
                    f"/ on () group_left () sum(rate({_PARTS}{{{OF_JOB}}}[$__rate_interval]))",
                    "{{part}}",
                )
            ],
            unit="percentunit",
            stacked=True,
            lowest=0,
            highest=1,
        ),
        Panel(
            title="Step seconds",
            description="Of the slowest rank, and of them, how long the rank that waited longest "
            "had nothing else to compute.",
            queries=[
                Query(
                    worst("distca_control_plane_step_seconds", OF_JOB, "job_name"),
                    "{{job_name}} step",
                ),
                Query(
                    worst("distca_control_plane_wait_seconds", OF_JOB, "job_name"),
                    "{{job_name}} waits",
                ),
            ],
            unit="s",
            lowest=0,
        ),
    ],
)

DASHBOARD = Dashboard(
    name="overview",
    title="Overview",
    description="Is core attention balanced, is communication hidden, and what limits the step?",
    variables=[NAMESPACE, JOB],
    annotations=HAPPENED,
    rows=[_NOW, _BALANCE, _COMMUNICATION_ROW, _LIMITS],
)
