"""Every wait goes by a clock that nobody can set."""

from __future__ import annotations

import ast

from tests import ROOT

PACKAGES = (
    "attention_node", "control_plane", "core_attention", "data_plane", "distca", "trainer_client",
)  # fmt: skip
WALL_CLOCK = {
    "control_plane/service/cluster_service.py": "shown to operators",
    "control_plane/leadership/epochs.py": "the first generation without a state directory",
    "distca/apps/doctor/cluster_probe.py": "how far the hosts' clocks are apart",
    "distca/process/tracing.py": "times of spans",
}
"""Where the wall clock is read, and for what: never for a wait."""


def test_no_wait_goes_by_the_wall_clock() -> None:
    """A clock that is set can make no deadline pass, and none last for ever."""
    found: dict[str, int] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            calls = [
                node
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute)
                and node.attr in ("time", "time_ns")
                and isinstance(node.value, ast.Name)
                and node.value.id == "time"
            ]
            if calls:
                found[str(path.relative_to(ROOT))] = len(calls)
    assert set(found) <= set(WALL_CLOCK), found
