"""Settings of served core attention, beside torchtitan's own: ``--distca.job`` and so on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(kw_only=True, slots=True)
class DistcaSettings:
    control_plane: str = field(
        default_factory=lambda: os.environ.get("DISTCA_CONTROL_PLANE") or "localhost:7700"
    )
    """host:port of the control plane; with standbys, all addresses with commas between."""

    job: str = "torchtitan"
    """Name of the job, unique among those that run."""

    placement: Literal["pool", "in-place", "mixed"] = "in-place"
    """The servers that compute core attention: attention nodes, the ranks themselves, or both."""

    ping_pong: bool = True
    """
    Cut each batch into two halves that take turns, so that one computes while the other's rows
    travel. In a pipeline a microbatch stays whole with tensor parallelism, if the order of its
    schedule is unknown, and in models with experts where no document is cut.
    """

    cut_documents: bool = True
    """
    Cut in the middle, whatever document lies there, so that halves are equal; otherwise at the
    begin of a document near the middle.
    """

    transport: Literal["auto", "ucxx", "nixl", "nixl:libfabric"] = "auto"
    """The transport of rows."""

    data_host: str | None = None
    """Address of this machine that other ranks reach; None: that of its host name."""

    one_host: bool = False
    """All ranks and servers are on this machine, so shared memory may be used."""

    def session_options(self) -> dict[str, Any]:
        """Options for :class:`trainer_client.SessionOptions` as it is, but for the job's name."""
        options: dict[str, Any] = {
            "control_plane": self.control_plane,
            "placement": self.placement,
            "transport": self.transport,
            "one_host": self.one_host,
        }
        return options if self.data_host is None else {**options, "data_host": self.data_host}
