"""Variables, selectors and colours that the dashboards share."""

from __future__ import annotations

from tools.dashboards.grafana import Annotation, Threshold, Variable

NAMESPACE = Variable("namespace", "Namespace", "label_values(distca_build_info, namespace)")
JOB = Variable(
    "job_name",
    "Job",
    'label_values(distca_control_plane_job_ranks{namespace=~"$namespace"}, job_name)',
)
SERVER = Variable(
    "server",
    "Server",
    'label_values(distca_control_plane_server_info{namespace=~"$namespace"}, server)',
)
PROCESS = Variable(
    "instance",
    "Process",
    'label_values(distca_data_plane_connections{namespace=~"$namespace"}, instance)',
)

OF_NAMESPACE = 'namespace=~"$namespace"'
OF_JOB = f'{OF_NAMESPACE}, job_name=~"$job_name"'
OF_SERVER = f'{OF_NAMESPACE}, server=~"$server"'
OF_PROCESS = f'{OF_NAMESPACE}, instance=~"$instance"'


HAPPENED = [
    Annotation(
        "Replans",
        "sum by (job_name) "
        f"(increase(distca_control_plane_replans_total{{{OF_NAMESPACE}}}[1m])) > 0",
        "Steps of job {{job_name}} were planned again",
        "orange",
    ),
    Annotation(
        "Drains",
        f'sum by (kind) (distca_control_plane_servers{{{OF_NAMESPACE}, state="draining"}}) > 0',
        "Servers ({{kind}}) finish their steps and leave",
        "blue",
    ),
    Annotation(
        "Recoveries",
        "sum by (job_name) "
        f"(increase(distca_trainer_recovery_seconds_count{{{OF_NAMESPACE}}}[1m])) > 0",
        "Job {{job_name}} replayed the ticks of a lost server",
        "red",
    ),
    Annotation(
        "Deployments",
        f"count by (role, version) (distca_build_info{{{OF_NAMESPACE}}}) unless on (role, version) "
        f"count by (role, version) (distca_build_info{{{OF_NAMESPACE}}} offset 1m)",
        "{{role}} of version {{version}}",
        "purple",
    ),
]
"""What explains a bend in any curve."""


def rising(warn: float, bad: float) -> tuple[Threshold, ...]:
    """Green, from ``warn`` on yellow, from ``bad`` on red."""
    return Threshold(None, "green"), Threshold(warn, "yellow"), Threshold(bad, "red")


def falling(bad: float, warn: float) -> tuple[Threshold, ...]:
    """Red, from ``bad`` on yellow, from ``warn`` on green."""
    return Threshold(None, "red"), Threshold(bad, "yellow"), Threshold(warn, "green")


def quantile(share: float, metric: str, selector: str, *by: str) -> str:
    """A quantile of a histogram's observations, by some of its labels."""
    labels = ", ".join(("le", *by))
    buckets = f"rate({metric}_bucket{{{selector}}}[$__rate_interval])"
    return f"histogram_quantile({share:g}, sum by ({labels}) ({buckets}))"


def rate(metric: str, selector: str, by: str) -> str:
    """The summed rate of a counter."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def increase(metric: str, selector: str, by: str, window: str = "15m") -> str:
    """By how much a counter grew in ``window``."""
    return f"sum by ({by}) (increase({metric}{{{selector}}}[{window}]))"


SHOWN_ENDS = 5
"""Of hundreds of lines, those at either end are drawn."""


def ends(expr: str) -> str:
    """The highest and the lowest of many series; all, if they are few."""
    return f"topk({SHOWN_ENDS}, {expr}) or bottomk({SHOWN_ENDS}, {expr})"


def highest(expr: str) -> str:
    """The highest of many series; all, if they are few."""
    return f"topk({2 * SHOWN_ENDS}, {expr})"


def worst(metric: str, selector: str, by: str) -> str:
    """The largest value of a gauge."""
    return f"max by ({by}) ({metric}{{{selector}}})"


def mean(metric: str, selector: str, by: str) -> str:
    """The mean of a histogram's observations."""
    return f"{rate(f'{metric}_sum', selector, by)} / {rate(f'{metric}_count', selector, by)}"
