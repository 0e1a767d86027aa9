"""Data plane: what the network achieves, peer by peer, and what fails."""

from __future__ import annotations

from tools.dashboards.common import (
    HAPPENED,
    NAMESPACE,
    OF_PROCESS,
    PROCESS,
    SHOWN_ENDS,
    highest,
    mean,
    quantile,
    rate,
)
from tools.dashboards.grafana import Dashboard, Panel, Query, Row

_PREFIX = "distca_data_plane"
_BUSIEST = 2 * SHOWN_ENDS
"""Processes that are drawn: of hundreds, the busiest are what limits a tick."""


def _busiest(metric: str) -> str:
    return highest(rate(metric, OF_PROCESS, "instance"))


_BANDWIDTH = Row(
    "Is the network what it should be?",
    [
        Panel(
            title="Bandwidth probe at start, slowest peers and their lanes",
            description="What trainers reached towards the servers that they reach worst when they "
            "connected, and over which lanes. tcp where there is NVLink or InfiniBand is a silent "
            "fallback: see the runbook, DistcaTransportBelowFloor.",
            queries=[
                Query(
                    f"bottomk({2 * SHOWN_ENDS}, min by (peer, lanes) "
                    f"({_PREFIX}_probe_bytes_per_second{{{OF_PROCESS}}}))",
                    "{{peer}} ({{lanes}})",
                )
            ],
            unit="Bps",
            kind="bargauge",
        ),
        Panel(
            title="Rate of large messages, and the floor",
            description="Mean rate of received messages of 256 KiB or more, each from its arrival "
            "on, of the processes with the slowest peers.",
            queries=[
                Query(
                    f"bottomk({2 * SHOWN_ENDS}, min by (instance) "
                    f"({_PREFIX}_receive_bytes_per_second{{{OF_PROCESS}}}))",
                    "{{instance}} slowest peer",
                ),
                Query(f"max({_PREFIX}_floor_bytes_per_second{{{OF_PROCESS}}})", "floor"),
            ],
            unit="Bps",
            lowest=0,
        ),
    ],
)

_TRAFFIC = Row(
    "Traffic",
    [
        Panel(
            title=f"Sent, {_BUSIEST} busiest processes",
            description="Bytes per second that a process hands to the network.",
            queries=[Query(_busiest(f"{_PREFIX}_sent_bytes_total"), "{{instance}}")],
            unit="Bps",
            lowest=0,
        ),
        Panel(
            title=f"Received, {_BUSIEST} busiest processes",
            description="Bytes per second that a process receives.",
            queries=[Query(_busiest(f"{_PREFIX}_received_bytes_total"), "{{instance}}")],
            unit="Bps",
            lowest=0,
        ),
        Panel(
            title="By transport",
            description="Bytes per second sent, over all processes.",
            queries=[
                Query(rate(f"{_PREFIX}_sent_bytes_total", OF_PROCESS, "transport"), "{{transport}}")
            ],
            unit="Bps",
            width=8,
            stacked=True,
            lowest=0,
        ),
        Panel(
            title="Messages per second",
            description="Transfers finished: a put is a message sent, an offer one received.",
            queries=[
                Query(
                    rate(f"{_PREFIX}_transfer_seconds_count", OF_PROCESS, "kind, transport"),
                    "{{kind}} {{transport}}",
                )
            ],
            unit="ops",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Mean bytes of a message sent",
            description="Small messages cannot use the bandwidth.",
            queries=[
                Query(
                    rate(f"{_PREFIX}_sent_bytes_total", OF_PROCESS, "transport")
                    + " / "
                    + rate(
                        f"{_PREFIX}_transfer_seconds_count",
                        f'{OF_PROCESS}, kind="put"',
                        "transport",
                    ),
                    "{{transport}}",
                )
            ],
            unit="bytes",
            width=8,
            lowest=0,
        ),
    ],
)

_TIMES = Row(
    "Transfers",
    [
        Panel(
            title="Transfer seconds (95th percentile)",
            description="A put since it was asked for and its bytes were written, an offer since "
            "its message arrived.",
            queries=[
                Query(
                    quantile(0.95, f"{_PREFIX}_transfer_seconds", OF_PROCESS, "kind", "transport"),
                    "{{kind}} {{transport}}",
                )
            ],
            unit="s",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Transfer seconds (mean)",
            description="Likewise.",
            queries=[
                Query(
                    mean(f"{_PREFIX}_transfer_seconds", OF_PROCESS, "kind, transport"),
                    "{{kind}} {{transport}}",
                )
            ],
            unit="s",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Failed transfers per second",
            description="By kind of error; 0 in a quiet system.",
            queries=[
                Query(
                    f"{rate(f'{_PREFIX}_failures_total', OF_PROCESS, 'kind')} or vector(0)",
                    "{{kind}}",
                )
            ],
            width=8,
            lowest=0,
        ),
    ],
)

_MEMORY = Row(
    "Connections and buffers",
    [
        Panel(
            title="Connections",
            description="Open ones, handshakes included.",
            queries=[
                Query(
                    highest(f"sum by (instance) ({_PREFIX}_connections{{{OF_PROCESS}}})"),
                    "{{instance}}",
                )
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Message buffers",
            description="Memory in use, and idle memory that waits to be used again.",
            queries=[
                Query(
                    highest(
                        f"sum by (instance, state) ({_PREFIX}_buffer_pool_bytes{{{OF_PROCESS}}})"
                    ),
                    "{{instance}} {{state}}",
                )
            ],
            unit="bytes",
            width=8,
            lowest=0,
        ),
        Panel(
            title="Allocations per second",
            description="0 in a steady state: buffers are used again.",
            queries=[
                Query(
                    highest(
                        rate(f"{_PREFIX}_buffer_pool_allocations_total", OF_PROCESS, "instance")
                    ),
                    "{{instance}}",
                )
            ],
            width=8,
            lowest=0,
        ),
        Panel(
            title="Message buffers, share of the limit",
            description="Near 1, ticks fail for want of buffers: raise --buffer-limit-mib, or plan "
            "fewer rows for the server.",
            queries=[
                Query(
                    highest(
                        f"max by (instance) "
                        f'({_PREFIX}_buffer_pool_bytes{{{OF_PROCESS}, state="in_use"}})'
                        f" / max by (instance) ({_PREFIX}_buffer_pool_limit_bytes{{{OF_PROCESS}}})"
                    ),
                    "{{instance}}",
                )
            ],
            unit="percentunit",
            width=24,
            height=6,
            lowest=0,
            highest=1,
        ),
    ],
)

DASHBOARD = Dashboard(
    name="data-plane",
    title="Data plane",
    description="What the network achieves, peer by peer, and what fails.",
    variables=[NAMESPACE, PROCESS],
    annotations=HAPPENED,
    rows=[_BANDWIDTH, _TRAFFIC, _TIMES, _MEMORY],
)
