"""Throughput of the ucxx transport against bare ucxx, in one run on one host.

Both send the same rounds: a tick of several messages at once, received into buffers that were
offered before, and a one-byte answer when all have arrived. Rounds alternate between the two, so
that noise of the machine hits both; the figures are medians.

    python -m benchmarks.transport --one-host --json transport.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import select
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from ucxx._lib import libucxx

from data_plane.buffer_pool import BufferPool, PooledBuffer
from data_plane.transport import Address, Claim, Connection
from data_plane.ucxx.connection import as_ucxx_array
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport

WAIT_SECONDS = 60.0
_SECRET = b"benchmark"
ANSWER_TAG = 2**31
HELLO_TAG = ANSWER_TAG + 1
_first_tags = itertools.count(0, 2 * ANSWER_TAG)
"""Of ticks: each message of a connection has a tag of its own."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Medians for one message size.

    Attributes:
        message_bytes: size of each message of a tick.
        messages: messages of a tick.
        raw_gigabytes_per_second: bare ucxx, 1e9 bytes per second, answer included.
        transport_gigabytes_per_second: the same through the transport.
        ratio: transport / raw.
    """

    message_bytes: int
    messages: int
    raw_gigabytes_per_second: float
    transport_gigabytes_per_second: float
    ratio: float


class RawSide:
    """Bare ucxx on the calling thread, with the same options and the same way to sleep."""

    def __init__(self, settings: UcxxSettings) -> None:
        feature = libucxx.Feature
        context = libucxx.UCXContext(
            settings.context_options(), (feature.TAG, feature.STREAM, feature.WAKEUP)
        )
        self._worker = libucxx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        self._poller = select.epoll()
        self._poller.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._endpoint: Any = None
        self._busy_poll_seconds = settings.effective_busy_poll_seconds

    def listen(self) -> int:
        requests: list[int] = []
        self._listener = libucxx.UCXListener.create(self._worker, 0, requests.append)
        self._requests = requests
        return int(self._listener.port)

    def accept(self) -> None:
        self._progress_until(lambda: bool(self._requests))
        self._endpoint = self._listener.create_endpoint_from_conn_request(self._requests[0], True)
        self.wait([self.receive(HELLO_TAG, BufferPool().acquire(1))])

    def connect(self, port: int) -> None:
        self._endpoint = libucxx.UCXEndpoint.create(self._worker, "127.0.0.1", port, True)
        self.wait([self.send(HELLO_TAG, BufferPool().acquire(1))])

    def receive(self, tag: int, buffer: PooledBuffer) -> Any:
        array = as_ucxx_array(buffer.tensor)
        return self._endpoint.tag_recv(array, libucxx.UCXXTag(tag), libucxx.UCXXTagMaskFull)

    def send(self, tag: int, buffer: PooledBuffer) -> Any:
        return self._endpoint.tag_send(as_ucxx_array(buffer.tensor), libucxx.UCXXTag(tag))

    def wait(self, requests: list[Any]) -> None:
        self._progress_until(lambda: all(request.completed for request in requests))
        for request in requests:
            request.check_error()

    def _progress_until(self, condition: Callable[[], bool]) -> None:
        start = time.monotonic()
        while True:
            self._worker.progress()
            if condition():
                return
            waited = time.monotonic() - start
            if waited > WAIT_SECONDS:
                raise TimeoutError(f"bare ucxx made no progress within {WAIT_SECONDS} s")
            if waited > self._busy_poll_seconds and self._worker.arm():
                self._poller.poll(0.1)


class Tick:
    """The buffers of one side for ticks of one size."""

    def __init__(self, pool: BufferPool, message_bytes: int, messages: int) -> None:
        self.buffers = [pool.acquire(message_bytes) for _ in range(messages)]
        for buffer in self.buffers:
            buffer.tensor.fill_(1)
        self.answer = pool.acquire(1)

    def release(self) -> None:
        for buffer in (*self.buffers, self.answer):
            buffer.release()


def serve(pipe: Pipe, settings: UcxxSettings) -> None:
    """The receiving process: obeys (library, message_bytes, messages, rounds)."""
    raw, transport = RawSide(settings), UcxxTransport(settings)
    pool = BufferPool.on_device(settings.device)
    accepted: list[Connection] = []

    def accept(claim: Claim, connection: Connection) -> bytes:
        claim.check(_SECRET)
        accepted.append(connection)
        return b""

    pipe.send((raw.listen(), transport.listen("127.0.0.1", 0, accept).port))
    raw.accept()
    while (order := pipe.recv()) is not None:
        library, message_bytes, messages, rounds = order
        tick = Tick(pool, message_bytes, messages)
        for _ in range(rounds):
            if library == "raw":
                serve_raw_tick(raw, tick, pipe)
            else:
                serve_transport_tick(accepted[0], tick, pipe)
        tick.release()
    transport.close()


def serve_raw_tick(raw: RawSide, tick: Tick, pipe: Pipe) -> None:
    receives = [raw.receive(tag, buffer) for tag, buffer in enumerate(tick.buffers)]
    pipe.send("ready")
    raw.wait(receives)
    raw.wait([raw.send(ANSWER_TAG, tick.answer)])


def serve_transport_tick(connection: Connection, tick: Tick, pipe: Pipe) -> None:
    first = next(_first_tags)
    offers = [
        connection.offer(tag, buffer, WAIT_SECONDS)
        for tag, buffer in enumerate(tick.buffers, first)
    ]
    pipe.send("ready")
    for offer in offers:
        offer.wait(WAIT_SECONDS)
    connection.put(first + ANSWER_TAG, tick.answer, WAIT_SECONDS).wait(WAIT_SECONDS)


def raw_tick_seconds(raw: RawSide, tick: Tick) -> float:
    start = time.perf_counter()
    requests = [raw.receive(ANSWER_TAG, tick.answer)]
    requests += [raw.send(tag, buffer) for tag, buffer in enumerate(tick.buffers)]
    raw.wait(requests)
    return time.perf_counter() - start


def transport_tick_seconds(connection: Connection, tick: Tick) -> float:
    start = time.perf_counter()
    first = next(_first_tags)
    transfers = [connection.offer(first + ANSWER_TAG, tick.answer, WAIT_SECONDS)]
    transfers += [
        connection.put(tag, buffer, WAIT_SECONDS) for tag, buffer in enumerate(tick.buffers, first)
    ]
    for transfer in transfers:
        transfer.wait(WAIT_SECONDS)
    return time.perf_counter() - start


def measure(
    settings: UcxxSettings, sizes: list[int], messages: int, rounds: int
) -> list[Measurement]:
    """Runs the receiving process and returns one measurement per message size."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, settings), daemon=True)
    process.start()
    transport = UcxxTransport(settings)
    try:
        theirs.close()
        raw_port, port = pipe.recv()
        raw = RawSide(settings)
        raw.connect(raw_port)
        connection, _ = transport.connect(
            Address("127.0.0.1", port), b"", WAIT_SECONDS, secret=_SECRET
        )
        pool = BufferPool.on_device(settings.device)
        results = []
        for message_bytes in sizes:
            tick = Tick(pool, message_bytes, messages)
            seconds: dict[str, list[float]] = {"raw": [], "transport": []}
            for turn in range(rounds):
                for library in ("raw", "transport"):
                    pipe.send((library, message_bytes, messages, 1))
                    pipe.recv()
                    if library == "raw":
                        elapsed = raw_tick_seconds(raw, tick)
                    else:
                        elapsed = transport_tick_seconds(connection, tick)
                    if turn >= rounds // 5:
                        seconds[library].append(elapsed)
            tick.release()
            results.append(summarize(message_bytes, messages, seconds))
        pipe.send(None)
        process.join(WAIT_SECONDS)
        return results
    finally:
        transport.close()
        process.kill()


def summarize(message_bytes: int, messages: int, seconds: dict[str, list[float]]) -> Measurement:
    gigabytes = message_bytes * messages / 1e9
    raw = gigabytes / statistics.median(seconds["raw"])
    transport = gigabytes / statistics.median(seconds["transport"])
    return Measurement(
        message_bytes=message_bytes,
        messages=messages,
        raw_gigabytes_per_second=raw,
        transport_gigabytes_per_second=transport,
        ratio=transport / raw,
    )


def show(results: list[Measurement], title: str) -> None:
    table = Table(title=title)
    for column in ("message", "messages", "bare ucxx GB/s", "transport GB/s", "ratio"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            f"{result.message_bytes / 1024:g} KiB",
            str(result.messages),
            f"{result.raw_gigabytes_per_second:.2f}",
            f"{result.transport_gigabytes_per_second:.2f}",
            f"{result.ratio:.2f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index>")
    parser.add_argument("--one-host", action="store_true", help="allow shared memory")
    parser.add_argument("--messages", type=int, default=4, help="messages of a tick")
    parser.add_argument("--rounds", type=int, default=40, help="ticks of each size and library")
    parser.add_argument(
        "--sizes-kib", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384, 65536]
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    settings = UcxxSettings(device=arguments.device, one_host=arguments.one_host)
    sizes = [kib * 1024 for kib in arguments.sizes_kib]
    results = measure(settings, sizes, arguments.messages, arguments.rounds)
    show(results, f"{settings.context_options()['TLS']} on {settings.device}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2))


if __name__ == "__main__":
    main()
