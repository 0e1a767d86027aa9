"""Images of GPUs hold what kernels are compiled with where they run.

They are built for real, with CUDA's builds of all packages. Where there is no GPU, everything but
the launch is seen: Triton makes its launcher in a container, against a driver of which only the
names are there, and PyTorch compiles for the CPU.
"""

from __future__ import annotations

import json

import pytest

from tests.deploy.conftest import BUILD_SECONDS
from tests.deploy.docker_engine import Docker, DockerError

pytestmark = pytest.mark.timeout(4 * BUILD_SECONDS)

AS_DEPLOYED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
"""As in compose.yaml; the folder of the user is a volume."""

TO_LIBRARIES = ("--tmpfs=/tmp:exec",)
"""Where torch.compile keeps its libraries: as for the trainers in compose.yaml."""

COMPILE_SECONDS = 300.0

MAX_MEBIBYTES_OVER_BASE = {"attention-node": 7500, "trainer": 8000}
"""A fifth more than measured, as for the images of CPUs."""

pytest_each_image = pytest.mark.parametrize("target", MAX_MEBIBYTES_OVER_BASE)

DRIVER = """
mkdir $HOME/driver
python - > $HOME/driver/cuda.c <<'END'
import pathlib, re, triton
source = pathlib.Path(triton.__file__).parent / "backends/nvidia/driver.c"
for name in sorted(set(re.findall(r"\\bcu[A-Z]\\w+", source.read_text()))):
    print(f"int {name}(void) {{ return 1; }}")
END
gcc -shared -Wl,-soname,libcuda.so.1 -o $HOME/driver/libcuda.so.1 $HOME/driver/cuda.c
export TRITON_LIBCUDA_PATH=$HOME/driver LD_LIBRARY_PATH=$HOME/driver
"""
"""A driver's library without a driver: all the functions that Triton's launcher names."""

MAKE_LAUNCHER = """python -c '
from triton.backends.nvidia.driver import CudaUtils
from core_attention.kernels.launcher import require_launcher
require_launcher(CudaUtils)
print("made", callable(CudaUtils().launch))
' 2>&1"""

COMPILE_KERNEL = """python -c '
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from core_attention.gpu_rows import _copy_by_rows
signature = {name: "i32" for name in _copy_by_rows.arg_names}
signature.update(dict.fromkeys(list(signature)[:2], "*i32"))
signature.update(dict.fromkeys(list(signature)[2:4], "*i64"))
constants = {"block_rows": 4, "block_columns": 512}
signature.update(dict.fromkeys(constants, "constexpr"))
source = ASTSource(_copy_by_rows, signature, constants)
print("cubin", len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]) > 1000)
'"""


def shell(docker: Docker, image: str, script: str, *options: str) -> str:
    """What ``script`` prints in a container as it is deployed."""
    command = ("run", "--rm", "--entrypoint=bash", *AS_DEPLOYED, *options, image, "-euc", script)
    return docker(*command, timeout_seconds=COMPILE_SECONDS)


@pytest_each_image
def test_the_first_kernel_of_triton_can_be_launched(
    docker: Docker, cuda_images: dict[str, str], target: str
) -> None:
    script = f"{DRIVER}\nid -u\n{MAKE_LAUNCHER}\n{COMPILE_KERNEL}\nfind $HOME -name '*.so'"
    user, made, compiled, *libraries = shell(docker, cuda_images[target], script).splitlines()
    assert (user, made, compiled) == ("10001", "made True", "cubin True")
    # Kernels are loaded as they are; nothing but the launcher is compiled by the host's compiler.
    assert len(libraries) == 1
    assert "/.triton/cache/" in libraries[0]


@pytest.mark.parametrize(
    "broken",
    [
        "PATH=/opt/distca/bin",
        *(f"export TRITON_CACHE_DIR=/{each}/cache" for each in ("opt", "tmp")),
    ],
    ids=["no compiler", "read-only cache", "cache that nothing is run from"],
)
def test_a_launcher_that_cannot_be_made_is_refused_by_name(
    docker: Docker, cuda_images: dict[str, str], broken: str
) -> None:
    """The engine mounts /tmp so that nothing can be run from it."""
    script = f"{DRIVER}\n{broken}\n{MAKE_LAUNCHER} || true"
    *_, said = shell(docker, cuda_images["attention-node"], script).splitlines()
    assert "LauncherError: " in said


def test_pytorch_compiles_in_the_trainers_image(
    docker: Docker, cuda_images: dict[str, str]
) -> None:
    program = (
        "import torch\n"
        "double = torch.compile(lambda x: (2 * x).sum(), dynamic=True)\n"
        "print(float(double(torch.ones(64))))"
    )
    script = f"python -c '{program}'"
    assert shell(docker, cuda_images["trainer"], script, *TO_LIBRARIES) == "128.0"


@pytest_each_image
def test_nothing_else_that_builds_is_left(
    docker: Docker, cuda_images: dict[str, str], target: str
) -> None:
    tools = "make cmake nvcc git ninja"
    assert shell(docker, cuda_images[target], f"which {tools} || true") == ""
    assert shell(docker, cuda_images[target], "ls /opt/distca/bin | grep -w pip || true") == ""
    assert shell(docker, cuda_images[target], "ls -d /opt/tools /build /wheels || true") == ""
    find = "find /opt/distca /usr /etc -writable -not -type l 2>/dev/null || true"
    assert shell(docker, cuda_images[target], find) == ""


@pytest_each_image
def test_image_is_not_larger_than_it_has_to_be(
    docker: Docker, cuda_images: dict[str, str], cuda_base_image: str, target: str
) -> None:
    sizes = (docker.inspect(name)["Size"] for name in (cuda_images[target], cuda_base_image))
    mebibytes = (next(sizes) - next(sizes)) / 2**20
    assert mebibytes < MAX_MEBIBYTES_OVER_BASE[target]
    assert mebibytes > MAX_MEBIBYTES_OVER_BASE[target] / 2, "tighten the limit"


def test_a_node_s_kernels_run_on_a_gpu(docker: Docker, cuda_images: dict[str, str]) -> None:
    image = cuda_images["attention-node"]
    try:
        docker("run", "--rm", "--gpus=all", "--entrypoint=true", image)
    except DockerError as error:
        pytest.skip(f"the engine gives no GPU to containers: {str(error).splitlines()[-1]}")
    doctor = "distca doctor --device=cuda:0 --shape=8:2:64:bfloat16 --json || true"
    said = json.loads(shell(docker, image, doctor, "--gpus=all"))
    (kernels,) = (each for each in said["findings"] if each["check"] == "kernels")
    assert kernels["status"] == "pass", kernels
