"""How long it takes many ranks to shake hands with one server, and what the proof costs of it.

    python -m benchmarks.handshake --handshakes 512

Ranks in one process connect over UCX and TCP to a listener in another, a few at a time. Both sides'
work is in the figures. On a machine that does other work, too, processor time tells more than the
rate.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe

import psutil

from data_plane.proof import Ends, Transcript, client_proof, connection_keys, server_proof
from data_plane.transport import Address, Claim, Connection
from data_plane.ucxx.transport import UcxxTransport

_SECRET = os.urandom(36)
_AT_A_TIME = 8
_CONNECT_SECONDS = 30.0


def listen(pipe: Pipe, secret: bytes) -> None:
    """The server's process: takes in whoever knows ``secret`` until the pipe is written to."""

    def accept(claim: Claim, connection: Connection) -> bytes:
        claim.check(secret)
        return b"welcome"

    transport = UcxxTransport()
    pipe.send(transport.listen("127.0.0.1", 0, accept).port)
    pipe.recv()
    transport.close()


def measure(count: int) -> tuple[float, float]:
    """``count`` handshakes with one listener, _AT_A_TIME at a time: how many a second, and the
    processor seconds of both sides for each."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=listen, args=(theirs, _SECRET), daemon=True)
    process.start()
    transport = UcxxTransport()
    try:
        address = Address("127.0.0.1", pipe.recv())

        def connect(number: int) -> None:
            hello = b"rank %d of a job whose name has some letters" % number
            transport.connect(address, hello, _CONNECT_SECONDS, secret=_SECRET)

        connect(0)
        own, other = time.process_time(), _process_seconds(process.pid)
        began = time.perf_counter()
        with ThreadPoolExecutor(_AT_A_TIME) as threads:
            list(threads.map(connect, range(count)))
        seconds = time.perf_counter() - began
        busy = time.process_time() - own + _process_seconds(process.pid) - other
        return count / seconds, busy / count
    finally:
        pipe.send("end")
        transport.close()
        process.join(_CONNECT_SECONDS)


def _process_seconds(pid: int | None) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def proof_seconds(repeats: int = 2000) -> float:
    """What both sides compute for one handshake."""
    transcript = Transcript(
        server_nonce=os.urandom(32),
        client_nonce=os.urandom(32),
        ends=Ends(client="10.0.0.1:40000", server="10.0.0.2:7711"),
        hello=bytes(100),
    )
    began = time.perf_counter()
    for _ in range(repeats):
        for _side in range(2):
            client_proof(_SECRET, transcript)
            server_proof(_SECRET, transcript, 2, b"welcome")
            connection_keys(_SECRET, transcript)
    return (time.perf_counter() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--handshakes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    measured = [measure(arguments.handshakes) for _ in range(arguments.rounds)]
    rate, busy = (statistics.median(column) for column in zip(*measured, strict=True))
    print(f"{arguments.handshakes} handshakes: {rate:.0f} a second, {busy * 1e3:.2f} ms busy each")
    print(f"proofs and keys of both sides: {proof_seconds() * 1e6:.0f} us a handshake")


if __name__ == "__main__":
    main()
