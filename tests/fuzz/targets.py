"""All targets, by name."""

from __future__ import annotations

from tests.fuzz.codec import CodecTarget
from tests.fuzz.control_plane import ControlPlaneTarget
from tests.fuzz.harness import Target
from tests.fuzz.network import ChannelTarget, GreetingTarget, UcxTarget
from tests.fuzz.ticks import TickTarget

_ALL: tuple[Target, ...] = (
    ControlPlaneTarget(),
    CodecTarget(),
    TickTarget(),
    GreetingTarget(),
    ChannelTarget(),
    UcxTarget(),
)

TARGETS = {target.name: target for target in _ALL}
