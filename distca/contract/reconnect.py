"""Finding the control plane again: its addresses in turn, with backoff and jitter.

A control plane may have standbys, of which one takes over when it ends. Its clients
know the addresses of all and try one after the other; a standby answers UNAVAILABLE.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from random import SystemRandom
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
)

from distca.contract import rpc
from distca.contract.timeouts import default_seconds

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LONGEST_WAIT_SECONDS = default_seconds("longest_wait_seconds")
"""Between two attempts. Waits are random up to a limit that doubles from 0.2 s to this."""

ATTEMPT_SECONDS = default_seconds("reach_seconds")
"""How long an address may take to accept a connection before it is the next one's turn."""

TOLD_AFTER_SECONDS = 5.0
"""After so long a warning says what is waited for."""


class Addresses:
    """The addresses of a control plane and its standbys.

    Args:
        settings: whose address is ``host:port``, or several of them with commas between.
    """

    def __init__(self, settings: rpc.RpcSettings) -> None:
        seconds = min(ATTEMPT_SECONDS, settings.connect_seconds)
        self._each = [
            replace(settings, address=address, connect_seconds=seconds)
            for address in settings.addresses
        ]
        self._next = 0

    def current(self) -> rpc.RpcSettings:
        """Settings for the control plane to try now."""
        return self._each[self._next]

    def advance(self) -> None:
        """The current one did not answer: the next one's turn."""
        self._next = (self._next + 1) % len(self._each)

    def __str__(self) -> str:
        return ", ".join(settings.address for settings in self._each)


def reach(
    attempt: Callable[[rpc.RpcSettings], Result],
    addresses: Addresses,
    *,
    timeout_seconds: float,
    giving_up: threading.Event,
    again: Callable[[rpc.Reason], bool] = lambda reason: reason.is_transient,
) -> Result:
    """The result of the first ``attempt`` that goes well, at one address after the other.

    Args:
        attempt: connects and says what it has to say.
        addresses: where; an attempt that fails moves on to the next.
        timeout_seconds: no attempt begins later than this after the first.
        giving_up: when set, no further attempt is made.
        again: which failures are worth another attempt.

    Raises:
        RpcError: of the last attempt.
    """

    def attempt_in_turn() -> Result:
        try:
            return attempt(addresses.current())
        except rpc.RpcError:
            addresses.advance()
            raise

    told = False

    def tell(state: RetryCallState) -> None:
        nonlocal told
        if told or (state.seconds_since_start or 0.0) < TOLD_AFTER_SECONDS:
            return
        told = True
        logger.warning(
            "the control plane at %s does not answer yet; trying for %g s (its first start on a "
            "machine compiles the planner, which takes about a minute)",
            addresses,
            timeout_seconds,
        )

    longest_wait = wait_exponential(multiplier=0.2, max=LONGEST_WAIT_SECONDS)
    retrying = Retrying(
        stop=stop_after_delay(timeout_seconds) | stop_when_event_set(giving_up),
        # Not by the process's generator, which is the training loop's.
        wait=lambda state: SystemRandom().uniform(0.0, longest_wait(state)),
        retry=retry_if_exception(
            lambda error: isinstance(error, rpc.RpcError) and again(error.reason)
        ),
        sleep=sleep_using_event(giving_up),
        before_sleep=tell,
        reraise=True,
    )
    return retrying(attempt_in_turn)
