"""A snapshot as tables for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distca.process.amounts import duration_text, size_text
from distca.process.plain_text import plain
from distca.top.snapshot import JobView, ServerView, Snapshot, StepView

SILENT_SECONDS = 10.0
"""Without a heartbeat for so long a server is shown as silent; it sends one every few seconds."""


_PLANNER_STATES = {
    "compiling": "planner is being compiled, plans take longer",
    "uncompiled": "planner could not be compiled, plans take longer: see the control plane's log",
}


def render(snapshot: Snapshot, away: str = "", away_seconds: float = 0.0) -> RenderableType:
    """Header, servers and jobs.

    Args:
        snapshot: the last one that came.
        away: why no newer one comes; empty if it is fresh.
        away_seconds: since when.
    """
    parts: list[RenderableType] = [_header(snapshot)]
    if away:
        parts.append(
            Text(
                f"No answer for {away_seconds:.0f} s, what follows is old; trying again. "
                + plain(away),
                style="bold red",
            )
        )
    parts += [_servers(snapshot), _jobs(snapshot)]
    return Group(*parts)


def _header(snapshot: Snapshot) -> Text:
    draining = len(snapshot.servers) - snapshot.n_serving
    parts = [
        f"DistCA {snapshot.version} at {snapshot.address}",
        f"up {duration_text(snapshot.uptime_seconds, short=True)}",
        _count(len(snapshot.servers), "server") + (f" ({draining} draining)" if draining else ""),
        _count(len(snapshot.jobs), "job"),
        f"{_gigabytes(snapshot.moved_bytes_per_second)} GB/s",
    ]
    busy = [server.busy_ratio for server in snapshot.servers if server.job is None]
    if busy:
        parts.append(f"busy {sum(busy) / len(busy):.0%} in the mean, {max(busy):.0%} at most")
    if snapshot.planner_state in _PLANNER_STATES:
        parts.append(_PLANNER_STATES[snapshot.planner_state])
    return Text(plain("   ".join(parts)), style="bold")


def _servers(snapshot: Snapshot) -> RenderableType:
    if not snapshot.servers:
        return Text("No server has joined.", style="dim")
    table = Table(box=None, padding=(0, 1), header_style="bold dim", expand=True)
    for name in ("server", "host", "device", "state"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    table.add_column("busy", width=16)
    for name in ("queue", "ticks", "buffers", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for server in snapshot.servers:
        name = server.server_id
        if server.version != snapshot.version:
            name += f" ({server.version})"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"{server.busy_ratio:4.0%}",
            ProgressBar(total=1.0, completed=server.busy_ratio, width=10),
        )
        table.add_row(
            Text(plain(name)),
            Text(plain(server.host)),
            Text(plain(server.device)),
            _state(server),
            bar,
            str(server.queued_tasks),
            str(server.open_ticks),
            size_text(server.buffer_bytes),
            _gigabytes(server.moved_bytes_per_second),
        )
    return table


def _state(server: ServerView) -> Text:
    if server.seconds_since_heartbeat > SILENT_SECONDS:
        return Text(f"silent for {server.seconds_since_heartbeat:.0f} s", style="red")
    if server.draining:
        return Text("draining", style="yellow")
    if server.job is not None:
        return Text(f"in {plain(server.job)}, rank {server.rank}")
    return Text("serving", style="green")


def _jobs(snapshot: Snapshot) -> RenderableType:
    if not snapshot.jobs:
        return Text("No job is open.", style="dim")
    table = Table(box=None, padding=(0, 1), header_style="bold dim", expand=True)
    for name in ("job", "placement", "ranks", "step"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("s/step", "waits", "tokens/s", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("imbalance: home, planned, measured", no_wrap=True, overflow="ellipsis")
    for job in snapshot.jobs:
        table.add_row(
            Text(plain(job.name)),
            Text(plain(job.placement)),
            f"{job.n_joined_ranks}/{job.n_ranks}",
            _progress(job),
            *_step_cells(job.last_step),
            _balance(job),
        )
    return table


def _progress(job: JobView) -> Text:
    if job.recovering:
        return Text(f"recovering, epoch {job.epoch}", style="yellow")
    if job.planned_step is None:
        return Text("no step yet", style="dim")
    finished = "-" if job.finished_step is None else str(job.finished_step)
    return Text(f"{finished} done, {job.planned_step} planned")


def _step_cells(step: StepView | None) -> tuple[str, str, str, str]:
    if step is None:
        return ("-", "-", "-", "-")
    known = step.wait_seconds is not None and step.step_seconds > 0
    return (
        f"{step.step_seconds:.3g}",
        f"{(step.wait_seconds or 0.0) / step.step_seconds:.0%}" if known else "-",
        f"{step.tokens_per_second:,.0f}",
        _gigabytes(step.moved_bytes_per_second),
    )


def _balance(job: JobView) -> Text:
    """Each phase's ratios; a measured one beyond the tolerance is marked."""
    text = Text()
    for phase in job.last_step.balance if job.last_step else ():
        text.append(f"{phase.phase} " if not text else f"  {phase.phase} ", style="dim")
        text.append(f"{_ratio(phase.home_imbalance)} {_ratio(phase.predicted_imbalance)} ")
        beyond = (phase.measured_imbalance or 0.0) > 1 + job.tolerance
        text.append(_ratio(phase.measured_imbalance), style="yellow" if beyond else "")
    return text if text else Text("-")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"
