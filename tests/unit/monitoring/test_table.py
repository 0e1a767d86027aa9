"""``docs/metrics.md`` lists what the code defines."""

from __future__ import annotations

from tests.unit.monitoring.table import DOCUMENT, documented_metrics
from tools.metrics_page import printed

UNBOUNDED = {"step", "document", "document_id", "task", "tick", "tag", "lease", "job_id", "address"}
"""What may never be a label: it has a new value with every step, document or connection."""


def test_the_page_is_printed_from_the_tables_of_the_code() -> None:
    page = DOCUMENT.read_text()
    assert printed(page) == page, "run `make metrics-page`"
    row = next(line for line in page.splitlines() if line.startswith("| `distca_trainer_"))
    assert printed(page.replace(row, row.replace("|", "| stale ", 1))) == page
    assert printed(page.replace(f"{row}\n", "")) == page


def test_names_follow_the_conventions() -> None:
    for section, rows in documented_metrics().items():
        for row in rows.values():
            assert row.name.startswith(("distca_", "process_")), row.name
            assert row.name.endswith("_total") == (row.kind == "counter"), row.name
            assert row.text.endswith("."), f"{section}: {row.name}: {row.text}"
            assert not set(row.labels) & UNBOUNDED, row.name
