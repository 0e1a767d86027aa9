"""The measured speed of a job's servers, beside their profiles.

A profile is measured alone on a quiet device; in a job a server may run faster or slower: clocks,
neighbours, heat. Plans are made ahead, so a correction shows in measurements only some steps later.
A full correction per step would be repeated until then and overshoot. Each step therefore goes only
a part of the way, in logarithms, so that halving and doubling weigh the same; small deviations,
which are noise, are left alone; and a single wild measurement moves a speed by a bounded factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

DAMPING = 0.2
"""Share of the deviation corrected per step: stable for plans made up to 3 steps ahead."""
DEAD_BAND = 0.02
"""Relative deviation that counts as noise."""
LARGEST_STEP = 1.5
"""Factor by which one measurement may change a speed at most."""
SLOWEST, FASTEST = 0.05, 20.0
"""Bounds of a correction: beyond them a server is not slow but broken, or its profile is."""


class ServerSpeeds:
    """The corrections of one job's servers, by id; 1.0 until something was measured.

    A server's measured seconds are compared with the plan that they belong to, made with the speed
    of its time: steps planned before a correction took effect do not repeat it.
    """

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}

    def of(self, server_id: str) -> float:
        """The speed to plan ``server_id`` with."""
        return self._speeds.get(server_id, 1.0)

    def snapshot(self) -> Mapping[str, float]:
        """All speeds that were corrected, as they are now."""
        return dict(self._speeds)

    def measured(
        self,
        server_id: str,
        *,
        planned_speed: float,
        predicted_seconds: float,
        measured_seconds: float,
    ) -> None:
        """Takes in one step of one server.

        Args:
            planned_speed: the speed that the step was planned with.
            predicted_seconds: busy seconds that the plan expected.
            measured_seconds: busy seconds that the server reports.
        """
        speed = self.of(server_id)
        expected = predicted_seconds * planned_speed / speed
        if not (expected > 0 and 0 < measured_seconds < math.inf):
            return
        deviation = math.log(expected / measured_seconds)
        if abs(deviation) > math.log1p(DEAD_BAND):
            largest = math.log(LARGEST_STEP)
            step = min(max(DAMPING * deviation, -largest), largest)
            self._speeds[server_id] = min(max(speed * math.exp(step), SLOWEST), FASTEST)
