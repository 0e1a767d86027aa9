"""Generates ``distca/v1`` from ``proto/``: ``python tools/generate_stubs.py [OUT_DIR]``.

``tests/service/test_stubs.py`` fails when the generated files and ``proto/`` are out of step.
"""

from __future__ import annotations

import importlib.resources
import re
import sys
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto"

_STATIC_CALLS = re.compile(
    r"\n\n # This class is part of an EXPERIMENTAL API\.\n.*?(?=\n\nclass |\Z)", re.S
)
"""gRPC's calls without a stub, which nobody makes: half of the generated lines."""


def generate(out_dir: Path) -> None:
    """Writes the modules, their type stubs and the gRPC stubs below ``out_dir``."""
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    protos = sorted(PROTO_DIR.glob("distca/v1/*.proto"))
    out_dir.mkdir(parents=True, exist_ok=True)
    with_services = [proto for proto in protos if "\nservice " in proto.read_text()]
    for outputs, sources in (
        ([f"--python_out={out_dir}", f"--pyi_out={out_dir}"], protos),
        ([f"--grpc_python_out={out_dir}"], with_services),
    ):
        arguments = ["protoc", f"-I{PROTO_DIR}", f"-I{well_known}", *outputs, *map(str, sources)]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed; its message is above")
    for stubs in (out_dir / "distca" / "v1").glob("*_pb2_grpc.py"):
        text = _STATIC_CALLS.sub("", stubs.read_text())
        stubs.write_text(text.replace("import warnings\n", "").rstrip("\n") + "\n")
    (out_dir / "distca" / "v1" / "__init__.py").write_text(
        '"""Generated from ``proto/distca/v1`` by ``tools/generate_stubs.py``; do not edit."""\n'
    )


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
