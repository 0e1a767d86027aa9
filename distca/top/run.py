"""Shows snapshots once, or again and again until Ctrl-C."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from distca.contract.rpc import RpcSettings, open_channel
from distca.contract.rpc_errors import RpcError
from distca.errors import DistcaError
from distca.process.interrupt import StopRequest
from distca.process.plain_text import plain
from distca.top.snapshot import Snapshot, snapshot_from
from distca.top.view import render
from distca.v1 import cluster_pb2, cluster_pb2_grpc

_RETRY_SECONDS = 1.0
_POLL_SECONDS = 0.1
"""How soon a wait notices Ctrl-C."""


class TooFewServersError(DistcaError):
    """Fewer servers take work than were expected."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What to show, and how long to wait for it.

    Attributes:
        interval_seconds: between two looks.
        once: show one snapshot only.
        as_json: one JSON document for each snapshot, on a line of its own.
        expect_servers: with ``once``, so many servers must take work.
        wait_seconds: with ``once``, how long the control plane and those servers may take.
    """

    interval_seconds: float = 2.0
    once: bool = False
    as_json: bool = False
    expect_servers: int = 0
    wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.interval_seconds >= 0.1:
            raise ValueError(f"interval_seconds is {self.interval_seconds}; it must be 0.1 or more")
        if self.wait_seconds < 0:
            raise ValueError(f"wait_seconds is {self.wait_seconds}; it must be 0 or more")
        for name in ("expect_servers", "wait_seconds"):
            if getattr(self, name) and not self.once:
                raise ValueError(f"{name} is {getattr(self, name)}; it is for --once alone")


def watch(settings: RpcSettings, watch: Watch, console: Console) -> None:
    """Shows the cluster until Ctrl-C, or once.

    Raises:
        RpcError: with ``once``, the control plane cannot be asked, or refuses.
        TooFewServersError: with ``once``, fewer servers take work than expected.
        OSError, MismatchError: a TLS file cannot be used.
    """
    with open_channel(settings) as channel:
        look = _look(channel, settings)
        if watch.once:
            _show(_wait_for_snapshot(look, watch), watch, console)
            return
        # An exception out of a signal handler may be lost where a library runs callbacks.
        with StopRequest() as stop:
            if watch.as_json or not console.is_terminal:
                _repeat(look, watch, console, stop)
            else:
                _follow(look, watch, settings.address, console, stop)


def _look(channel: grpc.Channel, settings: RpcSettings) -> Callable[[], Snapshot]:
    stub = cluster_pb2_grpc.ClusterStub(channel)
    request = cluster_pb2.DescribeClusterRequest()
    return lambda: snapshot_from(stub.DescribeCluster(request), settings.address)


def _wait_for_snapshot(look: Callable[[], Snapshot], watch: Watch) -> Snapshot:
    """A snapshot with the servers that are expected, or the reason why there is none."""
    deadline = time.monotonic() + watch.wait_seconds
    while True:
        try:
            snapshot = look()
            if snapshot.n_serving >= watch.expect_servers:
                return snapshot
            error: Exception = TooFewServersError(
                f"{snapshot.n_serving} of {watch.expect_servers} servers take work; look at the "
                "logs of those that are missing"
            )
        except RpcError as refused:
            error = refused
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise error
        time.sleep(_RETRY_SECONDS)


def _repeat(
    look: Callable[[], Snapshot], watch: Watch, console: Console, stop: StopRequest
) -> None:
    """Prints snapshot after snapshot; errors go to stderr, and it goes on."""
    errors = Console(stderr=True, soft_wrap=True)
    while not stop.requested:
        try:
            _show(look(), watch, console)
        except RpcError as error:
            errors.print(plain(str(error)), markup=False, highlight=False)
        _wait(watch.interval_seconds, stop)


def _follow(
    look: Callable[[], Snapshot],
    watch: Watch,
    address: str,
    console: Console,
    stop: StopRequest,
) -> None:
    """The live view: while the control plane is away, the last snapshot stays and says so."""
    last: Snapshot | None = None
    seen_at = time.monotonic()
    with Live(Text(f"Asking {address} ..."), console=console, screen=True) as live:
        while not stop.requested:
            away = ""
            try:
                last, seen_at = look(), time.monotonic()
            except RpcError as error:
                away = str(error)
            live.update(_view(last, away, time.monotonic() - seen_at), refresh=True)
            _wait(watch.interval_seconds, stop)


def _wait(seconds: float, stop: StopRequest) -> None:
    """Sleeps, unless it is asked to stop."""
    deadline = time.monotonic() + seconds
    while not stop.requested and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_SECONDS))


def _view(last: Snapshot | None, away: str, away_seconds: float) -> RenderableType:
    if last is None:
        return Text(plain(f"Not reached yet, trying again. {away}"), style="bold red")
    return render(last, away, away_seconds)


def _show(snapshot: Snapshot, watch: Watch, console: Console) -> None:
    if watch.as_json:
        console.print(json.dumps(snapshot.as_json()), soft_wrap=True, markup=False, highlight=False)
    else:
        console.print(render(snapshot))
