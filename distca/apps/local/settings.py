"""Options of a run on this machine; the fields are command-line options."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from data_plane.transport import TransportName
from distca.contract.checks import check_least
from distca.contract.identity import check_name
from distca.contract.settings import Placement
from distca.options import option
from distca.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Processes of a local run, and the folder that it writes."""

    PANEL: ClassVar = "Local run"

    mode: Placement = option(
        Placement.POOL,
        "Core attention on attention nodes (pool), in the trainers' own processes "
        "(in-place), or both (mixed).",
    )
    trainers: int = option(2, "Trainer ranks.")
    nodes: int = option(2, "Attention nodes; none are started in-place.")
    threads: int = option(1, "Compute threads of each process.")
    transport: TransportName = option(
        TransportName.AUTO,
        "What moves the rows; auto is ucxx where it is installed: all is on one machine.",
    )
    name: str = option("", "Name of the run; default: mode and time of day.")
    runs_dir: Path = option(Path("runs"), "The run's folder is made in it.")

    def __post_init__(self) -> None:
        check_least(self, trainers=1, nodes=0, threads=1)
        if self.mode is Placement.POOL and self.nodes < 1:
            raise ValueError("nodes is 0; pool mode needs 1 or more, or choose --mode in-place")
        if self.name:
            check_name("name", self.name)

    @property
    def n_nodes(self) -> int:
        """Attention nodes that are started."""
        return 0 if self.mode is Placement.IN_PLACE else self.nodes

    def run_folder(self, now: datetime) -> RunFolder:
        """The folder of the run."""
        name = self.name or f"{self.mode}-{now:%Y%m%d-%H%M%S}"
        return RunFolder(self.runs_dir.absolute() / name)
