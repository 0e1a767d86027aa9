"""Writes the tables of ``docs/metrics.md`` from the tables of the code.

The sections keep their text around the tables; those of metrics that are not ours are left as they
are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention_node.metrics import LoadTable, NodeTable
from control_plane.metrics.job_metrics import JobTable
from control_plane.metrics.metrics import ControlPlaneTable
from control_plane.metrics.server_metrics import ServerTable
from control_plane.service.refusals import RefusalTable
from data_plane.metrics import DataPlaneTable, PoolTable, SlowestTable
from distca.metric_table import Metric, Table
from distca.process.certificates import CertificateTable
from trainer_client.metrics import TrainerTable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

SECTIONS: dict[str, tuple[type[Table], ...]] = {
    "Control plane": (ControlPlaneTable, JobTable, ServerTable, RefusalTable),
    "Attention servers": (NodeTable, LoadTable),
    "Trainers": (TrainerTable,),
    "Data plane": (DataPlaneTable, PoolTable, SlowestTable),
    "Certificates": (CertificateTable,),
}

_HEAD = "| metric | type | labels | meaning |\n|---|---|---|---|\n"


def printed(page: str) -> str:
    """``page`` with the table of every section as the code defines it.

    Raises:
        ValueError: a section of :data:`SECTIONS` is missing, or has no table.
    """
    for title, tables in SECTIONS.items():
        heading = page.find(f"\n## {title}\n")
        begin = page.find(_HEAD, heading)
        if heading < 0 or begin < 0:
            raise ValueError(f"{PAGE.name} has no section {title!r} with a table of metrics")
        begin += len(_HEAD)
        end = page.index("\n\n", begin - 1) + 1
        rows = sorted((row for table in tables for row in table.rows()), key=lambda row: row.name)
        page = page[:begin] + "".join(map(_as_markdown, rows)) + page[end:]
    return page


def _as_markdown(row: Metric[Any]) -> str:
    kind = row.kind.__name__.lower()
    labels = ", ".join(f"`{label}`" for label in row.label_names)
    return f"| `{row.name}` | {kind} | {labels} | {row.text} |\n"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(printed(PAGE.read_text()))


if __name__ == "__main__":
    main()
