"""Shows what the control plane answers once, or again and again until Ctrl-C."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable

from google.protobuf.json_format import MessageToDict
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from distca.apps.top.settings import Watch
from distca.apps.top.view import count_serving, render
from distca.contract.rpc import RpcSettings, open_channel
from distca.contract.rpc_errors import RpcError
from distca.errors import DistcaError
from distca.process.interrupt import StopRequest
from distca.process.plain_text import plain
from distca.v1 import cluster_pb2, cluster_pb2_grpc

Answer = cluster_pb2.DescribeClusterResponse

_RETRY_SECONDS = 1.0
_POLL_SECONDS = 0.1
"""The interval at which a wait looks for Ctrl-C."""


def watch(settings: RpcSettings, watch: Watch, console: Console) -> None:
    """Shows the cluster until Ctrl-C, or once."""
    look = functools.partial(_look, settings.following_files())
    if watch.once:
        _show(_wait_for_servers(look, watch), watch, settings.address, console)
        return
    # An exception out of a signal handler may be lost where a library runs callbacks.
    with StopRequest() as stop:
        if watch.as_json or not console.is_terminal:
            _repeat(look, watch, settings.address, console, stop)
        else:
            _follow(look, watch, settings.address, console, stop)
    stop.check()


def _look(settings: RpcSettings) -> Answer:
    """Over a new connection, with the certificates that there are now."""
    if settings.certificates is not None:
        settings.certificates.changed()
    with open_channel(settings) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        answer: Answer = stub.DescribeCluster(cluster_pb2.DescribeClusterRequest())
    return answer


def _wait_for_servers(look: Callable[[], Answer], watch: Watch) -> Answer:
    """An answer with the servers that are expected, or the reason why there is none."""
    deadline = time.monotonic() + watch.wait_seconds
    while True:
        try:
            answer = look()
            n_serving = count_serving(answer.servers)
            if n_serving >= watch.expect_servers:
                return answer
            error: Exception = DistcaError(
                f"{n_serving} of {watch.expect_servers} servers take work; look at the "
                "logs of those that are missing"
            )
        except RpcError as refused:
            error = refused
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise error
        time.sleep(_RETRY_SECONDS)


def _repeat(
    look: Callable[[], Answer], watch: Watch, address: str, console: Console, stop: StopRequest
) -> None:
    """Prints answer after answer; errors go to stderr, and it goes on."""
    errors = Console(stderr=True, soft_wrap=True)
    while not stop.requested:
        try:
            _show(look(), watch, address, console)
        except RpcError as error:
            errors.print(plain(str(error)), markup=False, highlight=False)
        _wait(watch.interval_seconds, stop)


def _follow(
    look: Callable[[], Answer],
    watch: Watch,
    address: str,
    console: Console,
    stop: StopRequest,
) -> None:
    """The live view: while the control plane is away, the last answer stays and says so."""
    last: Answer | None = None
    seen_at = time.monotonic()
    with Live(Text(f"Asking {address} ..."), console=console, screen=True) as live:
        while not stop.requested:
            away = ""
            try:
                last, seen_at = look(), time.monotonic()
            except RpcError as error:
                away = str(error)
            live.update(_view(last, address, away, time.monotonic() - seen_at), refresh=True)
            _wait(watch.interval_seconds, stop)


def _wait(seconds: float, stop: StopRequest) -> None:
    """Sleeps, unless it is asked to stop."""
    deadline = time.monotonic() + seconds
    while not stop.requested and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_SECONDS))


def _view(last: Answer | None, address: str, away: str, away_seconds: float) -> RenderableType:
    if last is None:
        return Text(plain(f"Not reached yet, trying again. {away}"), style="bold red")
    return render(last, address, away, away_seconds)


def _show(answer: Answer, watch: Watch, address: str, console: Console) -> None:
    if not watch.as_json:
        console.print(render(answer, address))
        return
    fields = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    console.print(json.dumps(fields), soft_wrap=True, markup=False, highlight=False)
