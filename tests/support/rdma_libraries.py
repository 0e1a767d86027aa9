"""A program that tells which libraries are missing of those that carry InfiniBand and RoCE, for any
Python that has nixl installed: in an image it runs without the tests."""

RDMA_MODULES = {"libuct_ib", "libuct_ib_mlx5", "libuct_ib_mlx5_ext"}
"""Of nixl's UCX. Others carry EFA, or launch transfers from a GPU."""

MISSING_LIBRARIES = """
import json, subprocess
from importlib.util import find_spec
from pathlib import Path

(package,) = filter(None, map(find_spec, ("nixl_cu13", "nixl_cu12")))
folder = Path(package.origin).parents[1] / f"{package.name}.libs"
missing = {}
for module in sorted(folder.glob("ucx/libuct_ib*.so*")):
    listed = subprocess.run(["ldd", module], capture_output=True, text=True, check=True).stdout
    missing[module.name.partition(".")[0]] = sorted(
        {line.split()[0] for line in listed.splitlines() if "not found" in line}
    )
print(json.dumps(missing))
"""
"""Prints the missing libraries of each module of UCX for RDMA, as JSON."""
