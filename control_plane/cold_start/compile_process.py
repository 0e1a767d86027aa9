"""``python -m control_plane.cold_start.compile_process PLANNER`` compiles it into numba's cache."""

from __future__ import annotations

import contextlib
import os
import sys

from control_plane.cold_start.child import end_with_parent

NICENESS = 10
"""Compiling may take longer where the machine has other things to do."""


def main() -> None:
    """Compiles and ends."""
    end_with_parent()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    from control_plane.planner.planners import PLANNERS, prepare

    prepare(PLANNERS[sys.argv[1]])


if __name__ == "__main__":
    main()
