"""How many calls and streams of one caller are under way. Pure state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from control_plane.errors import RefusedError
from distca.contract.rpc_errors import Reason


class CallsInFlight:
    """Lets each caller have ``limit`` calls under way, streams among them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._n_of: Counter[str] = Counter()

    @contextmanager
    def one_more(self, caller: str) -> Iterator[None]:
        """A call of ``caller`` is under way."""
        if self._n_of[caller] >= self._limit:
            raise RefusedError(
                Reason.QUOTA,
                f"{caller} has {self._limit} calls and streams under way, as many as one identity "
                "may (max_calls_per_identity); end some",
            )
        self._n_of[caller] += 1
        try:
            yield
        finally:
            self._n_of[caller] -= 1
            if not self._n_of[caller]:
                del self._n_of[caller]
