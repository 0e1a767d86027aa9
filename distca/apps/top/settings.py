"""Options of the live view; the fields are command-line options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from distca.contract.checks import check_least


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Options of the view, and how long to wait for it."""

    interval_seconds: Annotated[float, typer.Option(help="Between two looks.")] = 2.0
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON, one document on a line for each look.")
    ] = False
    expect_servers: Annotated[
        int, typer.Option(help="With --once: fail unless so many servers take work.")
    ] = 0
    wait_seconds: Annotated[
        float,
        typer.Option(help="With --once: how long the control plane and these servers may take."),
    ] = 0.0

    def __post_init__(self) -> None:
        check_least(self, interval_seconds=0.1, wait_seconds=0)
        for name in ("expect_servers", "wait_seconds"):
            if getattr(self, name) and not self.once:
                raise ValueError(f"{name} is {getattr(self, name)}; it is for --once alone")
