"""All tests; each folder is a ring: see CONTRIBUTING.md."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
