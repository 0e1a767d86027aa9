"""``python -m control_plane.cold_start.uncompiled_process FD`` plans what comes on a connection.

Requests are ``(planner, manifest, servers, shape, options, epoch)``; answers a plan, or the
exception that the planner raised. The environment has ``NUMBA_DISABLE_JIT=1``.
"""

from __future__ import annotations

import dataclasses
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from control_plane.cold_start.child import end_with_parent
from control_plane.planner.planners import PLANNERS

NOTE = "planned uncompiled, while the planner's machine code is compiled"
"""The end of such a plan's reason."""


def main() -> None:
    """Plans until the other end of the connection is closed."""
    end_with_parent()
    connection = Connection(int(sys.argv[1]))
    # Compiled integers wrap around in silence, and so do these.
    with np.errstate(over="ignore"):
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            connection.send(_answer(request))


def _answer(request: tuple[Any, ...]) -> Any:
    name, manifest, servers, shape, options, epoch = request
    try:
        plan = PLANNERS[name](manifest, servers, shape, options, epoch=epoch)
        return dataclasses.replace(plan, reason=f"{plan.reason}; {NOTE}", tasks_are_valid=True)
    except Exception as error:
        return error


if __name__ == "__main__":
    main()
