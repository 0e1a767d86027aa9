"""The dashboards as files."""

from __future__ import annotations

import json

from tools.dashboards import control_plane, data_plane, jobs, overview, servers

DASHBOARDS = (
    overview.DASHBOARD,
    servers.DASHBOARD,
    data_plane.DASHBOARD,
    control_plane.DASHBOARD,
    jobs.DASHBOARD,
)


def dashboard_files() -> dict[str, str]:
    """The text of each file by its name."""
    return {
        f"{dashboard.name}.json": json.dumps(dashboard.to_json(), indent=2) + "\n"
        for dashboard in DASHBOARDS
    }
