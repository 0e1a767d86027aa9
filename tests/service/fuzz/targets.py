"""All targets, by name."""

from __future__ import annotations

from tests.service.fuzz.codec import CodecTarget
from tests.service.fuzz.control_plane import ControlPlaneTarget
from tests.service.fuzz.harness import Target
from tests.service.fuzz.network import ChannelTarget, GreetingTarget, UcxTarget
from tests.service.fuzz.ticks import TickTarget

_ALL: tuple[Target, ...] = (
    ControlPlaneTarget(),
    CodecTarget(),
    TickTarget(),
    GreetingTarget(),
    ChannelTarget(),
    UcxTarget(),
)

TARGETS = {target.name: target for target in _ALL}
