"""``distca control-plane``: membership, planning and publication."""

from __future__ import annotations

from control_plane.settings import ControlPlaneSettings
from distca.options import options_from


@options_from
def control_plane(settings: ControlPlaneSettings) -> None:
    """Run the control plane: servers and trainers register here and receive plans."""
    from control_plane.server import run

    run(settings)
