"""A snapshot as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distca.apps.top.names import short_names
from distca.apps.top.snapshot import JobView, ServerView, Snapshot, StepView
from distca.process.amounts import duration_text, size_text
from distca.process.plain_text import plain

SILENT_SECONDS = 10.0
"""Without a heartbeat for so long a server is shown as silent; it sends one every few seconds."""


_PLANNER_STATES = {
    "compiling": "planner is being compiled, documents stay at home",
    "uncompiled": "planner could not be compiled, see its log; documents stay at home",
}

WIDE_COLUMNS = 110
"""From this width on hosts, devices and bars are shown, and imbalances beside their jobs."""
WIDE_TAKEN, NARROW_TAKEN, JOB_TAKEN = 62, 36, 68
"""Columns of a terminal that everything takes but names, and the state of a server."""
LEAST_NAME = 12
"""Columns that a name has in any terminal."""

IMBALANCE = "imbalance: home, planned, measured"


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
    parts += [_Servers(snapshot), _Jobs(snapshot.jobs)]
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


class _Servers:
    """The table of servers, as wide as it may be: in little room without host and device."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        servers = self._snapshot.servers
        if not servers:
            yield Text("No server has joined.", style="dim")
            return
        wide = options.max_width >= WIDE_COLUMNS
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold dim", expand=True)
        states = [_state(server) for server in servers]
        taken = max(len(state) for state in states) + (WIDE_TAKEN if wide else NARROW_TAKEN)
        room = max(options.max_width - taken, LEAST_NAME) // (2 if wide else 1)
        ids = short_names([plain(server.server_id) for server in servers], room)
        table.add_column("server", no_wrap=True, overflow="ellipsis", min_width=_least(ids))
        for name in (*(("host", "device") if wide else ()), "state"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        table.add_column("busy", width=15 if wide else 4)
        for name in ("queue", "ticks", "buffers", "GB/s"):
            table.add_column(name, justify="right", no_wrap=True)
        hosts = short_names([plain(server.host) for server in servers], room)
        for server, name, host, state in zip(servers, ids, hosts, states, strict=True):
            if server.version != self._snapshot.version:
                name += f" ({plain(server.version)})"
            table.add_row(
                Text(name),
                *((Text(host), Text(plain(server.device))) if wide else ()),
                state,
                _busy(server, with_bar=wide),
                str(server.queued_tasks),
                str(server.open_ticks),
                size_text(server.buffer_bytes),
                _gigabytes(server.moved_bytes_per_second),
            )
        yield table


def _least(names: Sequence[str]) -> int:
    """Columns of ``names`` in very little room: other columns are cut first, since a row without
    its name says nothing."""
    return min(max(map(len, names)), LEAST_NAME)


def _busy(server: ServerView, *, with_bar: bool) -> RenderableType:
    share = f"{server.busy_ratio:4.0%}"
    if not with_bar:
        return share
    bar = Table.grid(padding=(0, 1))
    bar.add_row(share, ProgressBar(total=1.0, completed=server.busy_ratio, width=10))
    return bar


def _state(server: ServerView) -> Text:
    if server.seconds_since_heartbeat > SILENT_SECONDS:
        return Text(f"silent for {server.seconds_since_heartbeat:.0f} s", style="red")
    if server.draining:
        return Text("draining", style="yellow")
    if server.job is not None:
        return Text(f"in {plain(server.job)}, rank {server.rank}")
    return Text("serving", style="green")


class _Jobs:
    """The table of jobs; in little room their imbalances are lines of their own."""

    def __init__(self, jobs: Sequence[JobView]) -> None:
        self._jobs = jobs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._jobs:
            yield Text("No job is open.", style="dim")
            return
        wide = options.max_width >= WIDE_COLUMNS
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold dim", expand=True)
        room = max(options.max_width - JOB_TAKEN, LEAST_NAME)
        names = short_names([plain(job.name) for job in self._jobs], room)
        table.add_column("job", no_wrap=True, overflow="ellipsis", min_width=_least(names))
        for name in ("placement", "ranks", "step"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for name in ("s/step", "waits", "tokens/s", "GB/s"):
            table.add_column(name, justify="right", no_wrap=True)
        if wide:
            table.add_column(IMBALANCE, no_wrap=True, overflow="ellipsis")
        for job, name in zip(self._jobs, names, strict=True):
            table.add_row(
                Text(name),
                Text(plain(job.placement)),
                f"{job.n_joined_ranks}/{job.n_ranks}",
                _progress(job),
                *_step_cells(job.last_step),
                *((_balance(job),) if wide else ()),
            )
        yield table
        if not wide:
            yield Text(IMBALANCE, style="bold dim")
            for job, name in zip(self._jobs, names, strict=True):
                yield Text(f"{name}  ").append_text(_balance(job))


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
