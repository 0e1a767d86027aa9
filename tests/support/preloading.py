"""Imported last by the server of forks: what they find besides modules."""

from __future__ import annotations

import gc

from control_plane.planner import planners

for planner in planners.PLANNERS.values():
    planners.load(planner)
# Collections in forks would copy all of this.
gc.collect()
gc.freeze()
