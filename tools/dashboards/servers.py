"""Servers: who is busy, who waits, and where a tick's time goes."""

from __future__ import annotations

from tools.dashboards.common import (
    HAPPENED,
    NAMESPACE,
    OF_SERVER,
    SERVER,
    ends,
    highest,
    mean,
    quantile,
    rate,
    worst,
)
from tools.dashboards.grafana import Dashboard, Panel, Query, Row, Threshold

_NODE = "distca_attention_node"
_CONTROL_PLANE = "distca_control_plane"

_POOL = Row(
    "Servers",
    [
        Panel(
            title="Live servers",
            description="Pool servers hold a lease of their own, in-place servers their rank's.",
            queries=[Query(f"{_CONTROL_PLANE}_server_info{{{OF_SERVER}}}")],
            kind="table",
        ),
        Panel(
            title="Share of time in kernels, busiest and idlest",
            description="Idle is the rest. The pool is balanced when the lines lie together.",
            queries=[
                Query(ends(rate(f"{_NODE}_busy_seconds_total", OF_SERVER, "server")), "{{server}}")
            ],
            unit="percentunit",
            lowest=0,
            highest=1,
        ),
        Panel(
            title="Share of time without a kernel",
            description="Waiting for rows, or nothing to do.",
            queries=[
                Query(
                    highest(rate(f"{_NODE}_idle_seconds_total", OF_SERVER, "server")), "{{server}}"
                )
            ],
            unit="percentunit",
            lowest=0,
            highest=1,
        ),
        Panel(
            title="Mean queue depth",
            description="Groups of CA-tasks that wait for the device. It is what the pool is "
            "scaled on: a queue that stays, with all servers busy, asks for more of them.",
            queries=[
                Query(
                    highest(rate(f"{_NODE}_queue_seconds_total", OF_SERVER, "server")), "{{server}}"
                )
            ],
            lowest=0,
            thresholds=[Threshold(None, "green"), Threshold(8, "red")],
        ),
    ],
)

_TICKS = Row(
    "Ticks",
    [
        Panel(
            title="Where a tick's time goes, in the mean",
            description="Of one rank's part of a tick: waiting for other ranks' rows and the "
            "device, in kernel calls, in transport.",
            queries=[
                Query(mean(f"{_NODE}_tick_seconds", OF_SERVER, "phase, part"), "{{phase}} {{part}}")
            ],
            unit="s",
            stacked=True,
            lowest=0,
        ),
        Panel(
            title="Slow ticks by part (95th percentile)",
            description="One part that stands out is what to look into.",
            queries=[
                Query(
                    quantile(0.95, f"{_NODE}_tick_seconds", OF_SERVER, "phase", "part"),
                    "{{phase}} {{part}}",
                )
            ],
            unit="s",
            lowest=0,
        ),
        Panel(
            title="Ticks under way",
            description="Ticks of which some messages have arrived.",
            queries=[
                Query(
                    highest(f"sum by (server) ({_NODE}_open_ticks{{{OF_SERVER}}})"), "{{server}}"
                ),
            ],
            lowest=0,
        ),
        Panel(
            title="Refused messages per second",
            description="Of an earlier epoch, of a job that is not served, or of a wrong size.",
            queries=[
                Query(
                    highest(rate(f"{_NODE}_stale_messages_total", OF_SERVER, "server, reason")),
                    "{{server}} {{reason}}",
                )
            ],
            lowest=0,
        ),
    ],
)

_KERNELS = Row(
    "Kernels",
    [
        Panel(
            title="Kernel call seconds",
            description="Median and 95th percentile of one fused call.",
            queries=[
                Query(
                    quantile(share, f"{_NODE}_kernel_call_seconds", OF_SERVER, "phase"),
                    f"{{{{phase}}}} p{share * 100:g}",
                )
                for share in (0.5, 0.95)
            ],
            unit="s",
            lowest=0,
        ),
        Panel(
            title="CA-tasks per kernel call",
            description="The more are fused, the better the device is used.",
            queries=[
                Query(
                    ends(mean(f"{_NODE}_kernel_call_tasks", OF_SERVER, "server, phase")),
                    "{{server}} {{phase}}",
                )
            ],
            lowest=0,
        ),
        Panel(
            title="CA-tasks per second",
            description="Run by each server.",
            queries=[Query(ends(rate(f"{_NODE}_tasks_total", OF_SERVER, "server")), "{{server}}")],
            unit="ops",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Query rows per second",
            description="Of the CA-tasks run.",
            queries=[
                Query(ends(rate(f"{_NODE}_query_rows_total", OF_SERVER, "server")), "{{server}}")
            ],
            unit="ops",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Query-key pairs per second",
            description="The work done; times 4, heads and head dim it is FLOP/s forward.",
            queries=[
                Query(
                    ends(rate(f"{_NODE}_qk_pairs_total", OF_SERVER, "server, phase")),
                    "{{server}} {{phase}}",
                )
            ],
            unit="ops",
            width=8,
            lowest=0,
        ),
    ],
)

_HOSTS = f"{_CONTROL_PLANE}_server_info{{{OF_SERVER}}}"


def _of_devices(metric: str) -> str:
    """A DCGM exporter's metric of the GPUs that servers and trainers compute on: it names its host,
    and on Kubernetes the pod that has the GPU, as which such a pod knows its host."""
    alternatives = (
        f'{metric} and on ({label}) label_join({_HOSTS}, "{label}", "", "host")'
        for label in ("Hostname", "pod", "exported_pod")
    )
    return " or ".join(alternatives)


_DEVICES = Row(
    "Devices, as NVIDIA's DCGM exporter sees them",
    [
        Panel(
            title="Share of time in which a GPU computes, busiest and idlest",
            description="Everything that runs there, not core attention alone. Empty without "
            "dcgm-exporter.",
            queries=[
                Query(
                    ends(_of_devices("DCGM_FI_PROF_GR_ENGINE_ACTIVE")), "{{Hostname}} GPU {{gpu}}"
                )
            ],
            unit="percentunit",
            lowest=0,
            highest=1,
        ),
        Panel(
            title="Share of time in which tensor cores compute, busiest and idlest",
            description="What attention and matrix products are made of.",
            queries=[
                Query(
                    ends(_of_devices("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")), "{{Hostname}} GPU {{gpu}}"
                )
            ],
            unit="percentunit",
            lowest=0,
            highest=1,
        ),
        Panel(
            title="GPU memory in use, the most",
            description="Of the device, in MiB as the exporter counts it.",
            queries=[
                Query(highest(_of_devices("DCGM_FI_DEV_FB_USED")), "{{Hostname}} GPU {{gpu}}")
            ],
            unit="mbytes",
            lowest=0,
        ),
        Panel(
            title="GPU power, the most and the least",
            description="A server whose GPU draws less than the others' may be throttled: compare "
            "with predicted over measured seconds below.",
            queries=[
                Query(ends(_of_devices("DCGM_FI_DEV_POWER_USAGE")), "{{Hostname}} GPU {{gpu}}")
            ],
            unit="watt",
            lowest=0,
        ),
    ],
)

_FORECASTS = Row(
    "Forecasts and membership",
    [
        Panel(
            title="Predicted over measured seconds",
            description="1 is exact; below 1 a server is slower than its profile says. The control "
            "plane corrects the speeds that it plans with step by step.",
            queries=[
                Query(
                    ends(
                        rate(
                            f"{_CONTROL_PLANE}_server_predicted_seconds_total", OF_SERVER, "server"
                        )
                        + " / "
                        + rate(f"{_CONTROL_PLANE}_server_busy_seconds_total", OF_SERVER, "server")
                    ),
                    "{{server}}",
                )
            ],
            lowest=0,
            decimals=2,
        ),
        Panel(
            title="Registrations",
            description="How often a server of this id has joined; a line that climbs is a server "
            "that flaps.",
            queries=[
                Query(
                    highest(
                        worst(f"{_CONTROL_PLANE}_server_registrations_total", OF_SERVER, "server")
                    ),
                    "{{server}}",
                )
            ],
            lowest=0,
        ),
        Panel(
            title="Load at the last heartbeat",
            description="As the control plane knows it: share of time busy. Pool servers only.",
            queries=[
                Query(
                    ends(worst(f"{_CONTROL_PLANE}_server_busy_ratio", OF_SERVER, "server")),
                    "{{server}}",
                )
            ],
            unit="percentunit",
            lowest=0,
            highest=1,
        ),
        Panel(
            title="Message buffers at the last heartbeat",
            description="Memory in use for messages. Pool servers only.",
            queries=[
                Query(
                    highest(worst(f"{_CONTROL_PLANE}_server_buffer_bytes", OF_SERVER, "server")),
                    "{{server}}",
                )
            ],
            unit="bytes",
            lowest=0,
        ),
    ],
)

DASHBOARD = Dashboard(
    name="servers",
    title="Servers",
    description="Attention servers: who is busy, who waits, and where a tick's time goes.",
    variables=[NAMESPACE, SERVER],
    annotations=HAPPENED,
    rows=[_POOL, _TICKS, _KERNELS, _DEVICES, _FORECASTS],
)
