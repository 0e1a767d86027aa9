"""Forges rows: what somebody does who reads a network and reaches a data port, and holds no secret.

    python -m tests.cluster.chaos.forger sniff DEVICE TARGET_IP |
        python -m tests.cluster.chaos.forger forge DEVICE TARGET_IP PORT COUNT

Announcements of UCX's long messages (its rendezvous) say the message's tag and size. Rows of its
own, of that size, go out under that tag from a UCX endpoint of its own.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
from collections.abc import Iterator

import numpy as np
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from data_plane.ucxx.settings import UcxxSettings

_ALL_PROTOCOLS = 3
_FRAME_BYTES = 2**17
_RECEIVE_BUFFER_BYTES = 2**26
_IP_AT, _TCP_AT_LEAST = 14, 54
_ANNOUNCEMENT = struct.pack("<BI", 9, 50)
"""UCP_AM_ID_RNDV_RTS and its length: tag, ids of endpoint and request, address, size, ..."""
_TAG = struct.Struct("<Q")
_SIZE_AT = 32


def announcements(device: str, target: str) -> Iterator[tuple[int, int]]:
    """Tag and size of each long message to ``target`` that passes ``device``."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        tap.bind((device, 0))
        while True:
            frame = tap.recv(_FRAME_BYTES)
            if len(frame) < _TCP_AT_LEAST or frame[30:34] != socket.inet_aton(target):
                continue
            at = frame.find(_ANNOUNCEMENT, _IP_AT)
            body = at + len(_ANNOUNCEMENT)
            if at >= 0 and body + _SIZE_AT + _TAG.size <= len(frame):
                (tag,), (size,) = (
                    _TAG.unpack_from(frame, each) for each in (body, body + _SIZE_AT)
                )
                yield tag, size


def sniff(device: str, target: str) -> None:
    """Says tag and size of each message, a line each."""
    for tag, size in announcements(device, target):
        print(tag, size, flush=True)


def forge(own: str, target: str, port: int, count: int) -> None:
    """Forges the first ``count`` messages that it is told of."""
    feature = libucxx.Feature
    options = UcxxSettings(options={"NET_DEVICES": own}).context_options({})
    context = libucxx.UCXContext(options, (feature.TAG, feature.STREAM, feature.WAKEUP))
    worker = libucxx.UCXWorker(context)
    endpoint = libucxx.UCXEndpoint.create(worker, target, port, True)
    greeting = np.zeros(16, dtype=np.uint8)
    challenged = endpoint.stream_recv(Array(greeting))
    while not challenged.completed:
        worker.progress()
    sent = []
    # What came before is long gone.
    waiting = select.poll()
    waiting.register(sys.stdin, select.POLLIN)
    while waiting.poll(0):
        sys.stdin.readline()
    for _ in range(count):
        tag, size = map(int, sys.stdin.readline().split())
        rows = np.full(size // 4 + 1, 0.5, dtype=np.float32).view(np.uint8)[:size]
        request = endpoint.tag_send(Array(rows), libucxx.UCXXTag(tag))
        sent.append((request, rows))
        for _ in range(100):
            worker.progress()
        print(f"forged {size} bytes under {tag:x}", flush=True)
    while True:
        worker.progress()


if __name__ == "__main__":
    _, action, device, target, *rest = sys.argv
    if action == "sniff":
        sniff(device, target)
    else:
        forge(device, target, int(rest[0]), int(rest[1]))
