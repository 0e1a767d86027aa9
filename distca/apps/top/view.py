"""A control plane's answer as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distca.process.amounts import duration_text, size_text
from distca.process.plain_text import plain
from distca.v1 import cluster_pb2, jobs_pb2, membership_pb2

SILENT_SECONDS = 10.0
"""Without a heartbeat for so long a server is shown as silent; it sends one every few seconds."""

_PLACEMENTS = {
    jobs_pb2.PLACEMENT_POOL: "pool",
    jobs_pb2.PLACEMENT_IN_PLACE: "in-place",
    jobs_pb2.PLACEMENT_MIXED: "mixed",
}

_PLANNER_STATES = {
    "compiling": "planner is being compiled, documents stay at home",
    "uncompiled": "planner could not be compiled, see its log; documents stay at home",
}


def count_serving(servers: Iterable[membership_pb2.ServerStatus]) -> int:
    """How many take new work."""
    return sum(not server.draining for server in servers)


def render(
    answer: cluster_pb2.DescribeClusterResponse,
    address: str,
    away: str = "",
    away_seconds: float = 0.0,
) -> RenderableType:
    """Header, servers and jobs.

    Args:
        answer: the last one that came.
        address: of the control plane.
        away: why no newer one comes; empty if it is fresh.
        away_seconds: since when.
    """
    parts: list[RenderableType] = [_header(answer, address)]
    if away:
        parts.append(
            Text(
                f"No answer for {away_seconds:.0f} s, what follows is old; trying again. "
                + plain(away),
                style="bold red",
            )
        )
    return Group(*parts, _servers(answer), _jobs(answer.jobs))


def _header(answer: cluster_pb2.DescribeClusterResponse, address: str) -> Text:
    draining = len(answer.servers) - count_serving(answer.servers)
    moved = sum(server.load.moved_bytes_per_second for server in answer.servers)
    parts = [
        f"DistCA {answer.version} at {address}",
        f"up {duration_text(answer.uptime_seconds, short=True)}",
        _count(len(answer.servers), "server") + (f" ({draining} draining)" if draining else ""),
        _count(len(answer.jobs), "job"),
        f"{_gigabytes(moved)} GB/s",
    ]
    busy = [each.load.busy_ratio for each in answer.servers if not each.in_place_job_id]
    if busy:
        parts.append(f"busy {sum(busy) / len(busy):.0%} in the mean, {max(busy):.0%} at most")
    if answer.planner_state in _PLANNER_STATES:
        parts.append(_PLANNER_STATES[answer.planner_state])
    return Text(plain("   ".join(parts)), style="bold")


def _table(texts: Iterable[str], numbers: Iterable[str]) -> Table:
    """A table whose names break where there is no room for them, and whose numbers do not."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold dim", expand=True)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _servers(answer: cluster_pb2.DescribeClusterResponse) -> RenderableType:
    if not answer.servers:
        return Text("No server has joined.", style="dim")
    table = _table(
        ("server", "host", "device", "state"), ("busy", "queue", "ticks", "buffers", "GB/s")
    )
    job_names = {job.job_id: job.name for job in answer.jobs}
    for each in answer.servers:
        server, load = each.server, each.load
        other = f" ({server.version})" if server.version != answer.version else ""
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"{load.busy_ratio:4.0%}",
            ProgressBar(total=1.0, completed=load.busy_ratio, width=5),
        )
        table.add_row(
            Text(plain(server.server_id + other)),
            Text(plain(server.host)),
            Text(plain(server.device)),
            _state(each, job_names.get(each.in_place_job_id, each.in_place_job_id)),
            bar,
            str(load.queued_tasks),
            str(load.open_ticks),
            size_text(load.buffer_bytes),
            _gigabytes(load.moved_bytes_per_second),
        )
    return table


def _state(server: membership_pb2.ServerStatus, job: str) -> Text:
    if server.seconds_since_heartbeat > SILENT_SECONDS:
        return Text(f"silent for {server.seconds_since_heartbeat:.0f} s", style="red")
    if server.draining:
        return Text("draining", style="yellow")
    if server.in_place_job_id:
        return Text(f"in {plain(job)}, rank {server.in_place_rank}")
    return Text("serving", style="green")


def _jobs(jobs: Iterable[cluster_pb2.JobStatus]) -> RenderableType:
    if not jobs:
        return Text("No job is open.", style="dim")
    table = _table(
        ("job", "placement", "ranks", "step", "imbalance: home, planned, measured"),
        ("s/step", "waits", "tokens/s", "GB/s"),
    )
    for job in jobs:
        table.add_row(
            Text(plain(job.name)),
            _PLACEMENTS.get(job.placement, "unknown"),
            f"{job.n_joined_ranks}/{job.n_ranks}",
            _progress(job),
            _balance(job),
            *_step_cells(job),
        )
    return table


def _progress(job: cluster_pb2.JobStatus) -> Text:
    if job.recovering:
        return Text(f"recovering, epoch {job.epoch}", style="yellow")
    if job.planned_step < 0:
        return Text("no step yet", style="dim")
    finished = "-" if job.finished_step < 0 else str(job.finished_step)
    return Text(f"{finished} done, {job.planned_step} planned")


def _step_cells(job: cluster_pb2.JobStatus) -> tuple[str, str, str, str]:
    step = job.last_step
    if step.step_seconds <= 0:
        return ("-", "-", "-", "-")
    known = step.HasField("wait_seconds")
    return (
        f"{step.step_seconds:.3g}",
        f"{step.wait_seconds / step.step_seconds:.0%}" if known else "-",
        f"{step.tokens / step.step_seconds:,.0f}",
        _gigabytes(step.moved_bytes / step.step_seconds),
    )


def _balance(job: cluster_pb2.JobStatus) -> Text:
    """Each phase's ratios; a measured one beyond the tolerance is marked."""
    text = Text()
    for phase in job.last_step.phases:
        text.append(f"{phase.phase} " if not text else f"  {phase.phase} ", style="dim")
        text.append(f"{_ratio(phase.home_imbalance)} {_ratio(phase.predicted_imbalance)} ")
        beyond = phase.measured_imbalance > 1 + job.tolerance
        text.append(_ratio(phase.measured_imbalance), style="yellow" if beyond else "")
    return text if text else Text("-")


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value else "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"
