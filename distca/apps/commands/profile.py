"""``distca profile``: measures what core attention costs on a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distca.options import option, options_from


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of a measurement and its output."""

    shape: Annotated[
        str,
        typer.Option(
            metavar="HEADS:KV_HEADS:HEAD_DIM:DTYPE",
            help="Attention shape, for example 32:8:128:bfloat16.",
        ),
    ]
    device: str = option("cpu", "cpu or cuda:INDEX.")
    quick: bool = option(
        False,
        "A coarse grid in seconds, as servers measure at start, instead of minutes.",
        "--quick/--full",
    )
    output: Path | None = option(
        None, "File to write. Default: where servers on this machine look, ~/.cache/distca."
    )


@options_from
def profile(options: ProfileOptions) -> None:
    """Measure the cost of core attention on this device, for servers and simulations."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from attention_node.settings import check_device
    from core_attention.kernels.select import select_kernel
    from core_attention.profiling import (
        FULL_GRID,
        QUICK_GRIDS,
        device_name,
        measure_profile,
        profile_file_name,
    )
    from core_attention.shape import parse_shape
    from core_attention.whole_file import check_can_write
    from distca.apps.commands.usage import as_usage_error
    from distca.process.plain_text import plain

    console = Console()
    with as_usage_error():
        shape = parse_shape(options.shape)
        check_device("device", options.device)
        device = torch.device(options.device)
        kernel = select_kernel(device)
        kernel.check(shape, shape.rule)
    path = options.output or (
        Path.home()
        / ".cache"
        / "distca"
        / profile_file_name(device_name(device), kernel.name, shape)
    )
    check_can_write(path)
    grid = QUICK_GRIDS[device.type] if options.quick else FULL_GRID
    with Progress(console=console) as progress:
        task = progress.add_task(f"measuring {kernel.name} on {device_name(device)}", total=None)
        measured = measure_profile(
            kernel,
            shape,
            device,
            grid.q_tokens,
            grid.kv_tokens,
            budget_seconds=grid.budget_seconds,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    measured.save(path)
    console.print(plain(f"Saved {path}"), soft_wrap=True, markup=False)
