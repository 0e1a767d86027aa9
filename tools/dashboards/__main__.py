"""Writes the dashboards to ``helm/distca/dashboards``: ``python -m tools.dashboards``."""

from __future__ import annotations

from pathlib import Path

from tools.dashboards.files import dashboard_files

FOLDER = Path(__file__).resolve().parents[2] / "helm" / "distca" / "dashboards"


def main() -> None:
    """Writes every file anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in dashboard_files().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
