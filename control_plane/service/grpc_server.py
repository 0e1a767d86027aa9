"""What grpc.aio knows of its server and does not tell."""

from __future__ import annotations

from typing import Any

import grpc


def is_serving(server: grpc.aio.Server) -> bool:
    """Whether a server that was started still takes calls.

    It stops by itself when an exception escapes its loop. ``wait_for_termination`` then waits for
    the calls that are under way, and so for streams that never end.
    """
    core: Any = server
    return bool(core._server.is_running())
