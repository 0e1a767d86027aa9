"""Options of the live view; the fields are command-line options."""

from __future__ import annotations

from dataclasses import dataclass

from distca.contract.checks import check_least
from distca.options import option


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Options of the view, and how long to wait for it."""

    interval_seconds: float = option(2.0, "Between two looks.")
    once: bool = option(False, "Show it once and end.", "--once")
    as_json: bool = option(False, "JSON, one document on a line for each look.", "--json")
    expect_servers: int = option(0, "With --once: fail unless so many servers take work.")
    wait_seconds: float = option(
        0.0, "With --once: how long the control plane and these servers may take."
    )

    def __post_init__(self) -> None:
        check_least(self, interval_seconds=0.1, wait_seconds=0)
        for name in ("expect_servers", "wait_seconds"):
            if getattr(self, name) and not self.once:
                raise ValueError(f"{name} is {getattr(self, name)}; it is for --once alone")
