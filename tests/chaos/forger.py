"""Forges rows: what somebody does who reads a network and reaches a data port, and holds no secret.

    python -m tests.chaos.forger SNIFFED_DEVICE OWN_DEVICE TARGET_IP LISTENER_PORT COUNT

Announcements of UCX's long messages (its rendezvous) say the message's tag and size. Rows of its
own, of that size, go out under that tag from a UCX endpoint of its own.
"""

from __future__ import annotations

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
        print("ready", flush=True)
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


def main(sniffed: str, own: str, target: str, port: int, count: int) -> None:
    """Forges the first ``count`` messages that it reads."""
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
    for forged, (tag, size) in enumerate(announcements(sniffed, target), 1):
        rows = np.full(size // 4 + 1, 0.5, dtype=np.float32).view(np.uint8)[:size]
        request = endpoint.tag_send(Array(rows), libucxx.UCXXTag(tag))
        sent.append((request, rows))
        for _ in range(100):
            worker.progress()
        print(f"forged {size} bytes under {tag:x}", flush=True)
        if forged == count:
            break
    while True:
        worker.progress()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
