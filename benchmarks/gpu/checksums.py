"""What sealing and verifying messages costs on a GPU, and what share of a layer that would be.

    python -m benchmarks.gpu.checksums
    python -m benchmarks.gpu.end_to_end --ranks 2 --ways disaggregated,sealed   # whole steps

The layer is that of Llama-3-8B: a rank's row has 12 KiB of q, k and v and 8 KiB of o and lse
forward. All rows are taken to leave the rank, which is the most that can.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from core_attention.checksum import seal, verify
from core_attention.message import CHECKSUM_BYTES

_KEY = bytes(range(32))
_ROW_BYTES = 20 * 1024 + 128
_WARM_UPS = 5
_MIB = 2**20


def seconds_of(function: str, message: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Medians of what the device takes for one call, and of what the thread does."""
    call = {"seal": seal, "verify": verify}[function]
    seal(message, 0, _KEY)
    device, host = [], []
    for turn in range(rounds + _WARM_UPS):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # So that launching is hidden, as behind a model's work; verifying waits in any case.
        if function == "seal":
            torch.cuda._sleep(1_000_000)
        begin.record()
        began = time.perf_counter()
        call(message, 0, _KEY)
        called = time.perf_counter() - began
        end.record()
        end.synchronize()
        if turn >= _WARM_UPS:
            host.append(called)
            device.append(begin.elapsed_time(end) / 1e3 if function == "seal" else called)
    return statistics.median(device), statistics.median(host)


def main(
    tokens_per_rank: Annotated[int, typer.Option(help="Rows that leave a rank.")] = 128 * 1024,
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    layer_seconds: Annotated[
        float, typer.Option(help="One layer forward, to compare with; measure your own.")
    ] = 0.1,
) -> None:
    """Measures it on this GPU."""
    table = Table(title=f"checksums on {torch.cuda.get_device_name()}")
    for column in ("", "MiB", "GPU us", "GB/s", "thread us"):
        table.add_column(column, justify="left" if not column else "right")
    whole = tokens_per_rank * _ROW_BYTES
    share = 0.0
    for nbytes in (_MIB // 4, 4 * _MIB, 64 * _MIB, 256 * _MIB, whole):
        message = torch.randint(
            0, 256, (nbytes // 32 * 32 + CHECKSUM_BYTES,), dtype=torch.uint8, device="cuda"
        )
        for function in ("seal", "verify"):
            device, host = seconds_of(function, message, rounds)
            share += device / layer_seconds if nbytes == whole else 0.0
            table.add_row(
                function,
                f"{nbytes / _MIB:.2f}",
                f"{device * 1e6:.0f}",
                f"{nbytes / device / 1e9:.0f}",
                f"{host * 1e6:.0f}",
            )
    Console().print(table)
    print(
        f"all rows of {tokens_per_rank} tokens, sealed and verified: {share:.2%} of a layer "
        f"forward of {layer_seconds * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    typer.run(main)
