"""Writes what DistCA requires as requirement files, one for itself and one for each extra.

    python3 requirements.py pyproject.toml /requirements

Without DistCA's own version: what is installed from them, and the layer of an image that it makes,
is the same for two releases that require the same.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(project_file: str, folder: str) -> None:
    project = tomllib.loads(Path(project_file).read_text())["project"]
    files = {"distca": project["dependencies"], **project["optional-dependencies"]}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, requirements in files.items():
        Path(folder, f"{name}.txt").write_text("".join(f"{one}\n" for one in requirements))


if __name__ == "__main__":
    main(*sys.argv[1:])
