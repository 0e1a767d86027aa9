"""Which CUDA calls wait for kernels that run on other streams.

A collective's kernel runs until all ranks have come. If another rank waits for this one's server
meanwhile, a call of the server that waits for the collective ends in a deadlock. So each call is
made twice on a thread of its own, with the device idle and with a kernel that runs for a second;
one that takes most of that second waits.

    python -m benchmarks.gpu.blocking_calls
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from core_attention.profiling import device_name
from data_plane.device_memory import allocate
from distca.train.device import prefer_expandable_segments

SPIN_SECONDS = 1.0
WAITS_FROM = 0.5
"""Of the kernel's time; a call that takes longer has waited for it."""

BLOCK_BYTES = 96 * 2**20
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True)
class Call:
    """A call to be tried.

    Attributes:
        name: shown.
        make: does it; is given 0 the first time and 1 the second, so that what is done once only,
            such as loading a kernel, can be another one each time.
    """

    name: str
    make: Callable[[int], Any]


def calls(device: torch.device, handles: list[bytes]) -> Iterator[Call]:
    """All calls; ``handles`` are two of another process's memory."""
    stream = torch.cuda.Stream(device)
    small = torch.ones(1024, device=device)
    event = torch.cuda.Event()

    def on_stream(action: Callable[[], Any]) -> None:
        with torch.cuda.stream(stream):
            kept.append(action())
        stream.synchronize()

    kept: list[Any] = []
    on_stream(lambda: small + 1)
    library = (torch.special.erfcx, torch.special.log_ndtr)
    yield Call("launch a kernel that has run before", lambda i: on_stream(lambda: small + 1))
    yield Call("record an event", lambda i: event.record(stream))
    yield Call(
        "launch one of PyTorch's for the first time",
        lambda i: on_stream(lambda: library[i](small)),
    )
    from benchmarks.gpu.tiny_kernels import KERNELS

    for kernel in KERNELS:
        # Compiles without loading, so that the time of a first launch is that of loading.
        kernel.warmup(small, grid=(1,))
    yield Call(
        "launch one of Triton's for the first time",
        lambda i: on_stream(lambda: KERNELS[i][(1,)](small)),
    )
    yield Call("cuMemAlloc", lambda i: kept.append(allocate(BLOCK_BYTES, device)))
    freed = [allocate(BLOCK_BYTES, device) for _ in range(2)]
    yield Call("cuMemFree", lambda i: freed.pop())
    yield Call(
        "new memory of PyTorch's cache",
        lambda i: on_stream(lambda: torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device)),
    )
    yield Call(
        "new pinned memory",
        lambda i: kept.append(torch.empty((33 << i) * 2**20, dtype=torch.uint8, pin_memory=True)),
    )
    yield Call("map another process's memory", lambda i: _map(handles[i]))
    yield Call("make a stream", lambda i: kept.append(torch.cuda.Stream(device)))


def _map(handle: bytes) -> None:
    memory = _Handle.from_buffer_copy(handle)
    address = ctypes.c_uint64()
    _driver(
        "cuIpcOpenMemHandle_v2", ctypes.byref(address), memory, ctypes.c_uint(_LAZY_PEER_ACCESS)
    )


def _driver(name: str, *arguments: Any) -> None:
    """Calls the CUDA driver; RuntimeError if it refuses."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: CUresult {status}")


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


def export(pipe: Connection, index: int) -> None:
    """The other process: gives out two blocks, and keeps them until it is told to end."""
    device = torch.device("cuda", index)
    torch.ones(1, device=device)
    blocks = [allocate(BLOCK_BYTES, device) for _ in range(2)]
    for block in blocks:
        handle = _Handle()
        _driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(block.data_ptr()))
        pipe.send(bytes(handle))
    pipe.recv()


def timed(call: Call, index: int, spin: Callable[[], None] | None) -> float:
    """Seconds that ``call`` takes on a thread of its own, while ``spin``'s kernel runs."""
    torch.cuda.synchronize()
    seconds: list[float] = []

    def run() -> None:
        # Makes the device's context the thread's.
        torch.cuda.current_stream().query()
        begin = time.perf_counter()
        call.make(index)
        seconds.append(time.perf_counter() - begin)

    if spin is not None:
        with torch.cuda.stream(torch.cuda.Stream()):
            spin()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    return seconds[0]


def spinner() -> Callable[[], None]:
    """Launches a kernel that runs for about SPIN_SECONDS."""
    cycles = 10**8
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    cycles = int(cycles * SPIN_SECONDS / (time.perf_counter() - begin))
    return lambda: torch.cuda._sleep(cycles)


def main(
    peers: Annotated[
        bool, typer.Option(help="With peer access between GPU 0 and 1, as NCCL has it.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Which CUDA calls wait for kernels that run on other streams."""
    prefer_expandable_segments()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if peers:
        torch.ones(1, device=device).to("cuda:1")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=export, args=(theirs, int(peers)), daemon=True)
    other.start()
    # So that its end, for whatever reason, ends the wait for what it sends.
    theirs.close()
    handles = [ours.recv() for _ in range(2)]
    spin = spinner()
    found = []
    table = Table(title=device_name(device) + (", peer access" if peers else ""))
    for column in ("call", "idle, ms", "beside a kernel of 1 s, ms", "waits"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for call in calls(device, handles):
        idle, beside = timed(call, 0, None), timed(call, 1, spin)
        waits = beside > WAITS_FROM * SPIN_SECONDS
        found.append({"call": call.name, "idle_s": idle, "beside_s": beside, "waits": waits})
        table.add_row(call.name, f"{idle * 1e3:.2f}", f"{beside * 1e3:.2f}", "yes" if waits else "")
    Console(width=110).print(table)
    ours.send(None)
    other.join(10)
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
