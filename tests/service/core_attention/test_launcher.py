"""What keeps Triton's launcher from being made is named, with what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core_attention import host_compiler
from core_attention.host_compiler import CPP, C, compiler_trouble
from core_attention.kernels.launcher import LauncherError, require_launcher
from distca.cli import main
from tests.support.programs import ran

SHAPE = "8:2:64:bfloat16"

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def raises(error: Exception) -> Callable[[], None]:
    def load() -> None:
        raise error

    return load


def refusal(error: Exception) -> str:
    with pytest.raises(LauncherError) as caught:
        require_launcher(raises(error))
    assert caught.value.__cause__ is error
    return str(caught.value)


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PATH holds this folder alone, and nothing names a compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return folder


TRITON_FINDS_NONE = RuntimeError("Failed to find C compiler. Please specify via CC ...")


def test_no_compiler(bare_path: Path) -> None:
    assert refusal(TRITON_FINDS_NONE) == (
        "no C compiler: there is no gcc or clang in PATH; Triton compiles a launcher at its first "
        "use; install gcc and python3-dev, or use the images built with VARIANT=cuda, which have it"
    )


def test_a_compiler_that_is_named_and_not_there(
    bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "gcc-99")
    said = refusal(FileNotFoundError(2, "No such file or directory", "gcc-99"))
    assert said.startswith("CC is 'gcc-99', and there is no such program; ")
    assert "unset CC" in said


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_no_headers_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler itself says what it does not find."""
    monkeypatch.setattr(host_compiler, "_include_folder", lambda: str(tmp_path))
    said = refusal(subprocess.CalledProcessError(1, ["gcc"]))
    assert said.startswith(f"no Python.h in {tmp_path}: the headers of Python 3.")
    assert "install python3-dev" in said


def test_a_compiler_that_does_not_work(bare_path: Path) -> None:
    broken = bare_path / "gcc"
    broken.write_text("#!/bin/sh\necho 'gcc: fatal error: cannot execute cc1' >&2\nexit 1\n")
    broken.chmod(0o755)
    said = refusal(subprocess.CalledProcessError(1, ["gcc"]))
    assert f"the compiler {broken} does not work: gcc: fatal error: cannot execute cc1" in said


def test_a_folder_that_cannot_be_written() -> None:
    said = refusal(OSError(30, "Read-only file system", "/home/me/.triton/cache/ABC"))
    assert "/home/me/.triton/cache/ABC, which cannot be written (Read-only file system)" in said
    assert "TRITON_CACHE_DIR" in said


def test_a_folder_from_which_nothing_runs() -> None:
    said = refusal(ImportError("cuda_utils.so: failed to map segment from shared object"))
    assert "failed to map segment" in said
    assert "noexec" in said


def test_the_command_line_shows_it_in_one_line(
    bare_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As any error of our packages; a node is refused before it looks for a control plane."""

    def select(device: torch.device) -> None:
        require_launcher(raises(TRITON_FINDS_NONE))

    monkeypatch.setattr("attention_node.server.select_kernel", select)
    node = ["attention-node", "--control-plane=nobody.invalid:7700", f"--shape={SHAPE}"]
    monkeypatch.setattr(sys, "argv", ["distca", *node, "--data-host=127.0.0.1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("LauncherError: no C compiler: ")
    assert "Traceback" not in said


def test_cpp_is_looked_for_by_its_own_names(
    bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare_path / "gcc").touch(mode=0o755)
    trouble = compiler_trouble(CPP)
    assert trouble is not None
    assert trouble.cause == "no C++ compiler: there is no g++ in PATH"
    assert trouble.advice == "install g++ and python3-dev"


def hidden_compilers(tmp_path: Path, *, hide: bool) -> dict[str, str]:
    """An environment with an empty cache of Triton's, and a PATH without programs if ``hide``."""
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    environ.pop("CC", None)
    if hide:
        (tmp_path / "bin").mkdir()
        environ["PATH"] = str(tmp_path / "bin")
    return environ


def distca(*arguments: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, "-m", "distca", *arguments, timeout=280, env=environ)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hide", [True, False])
def test_the_doctor_finds_out(tmp_path: Path, hide: bool) -> None:
    if not hide and compiler_trouble(C) is not None:
        pytest.skip("needs a C compiler and Python.h")
    environ = hidden_compilers(tmp_path, hide=hide)
    options = ["--device=cuda:0", f"--shape={SHAPE}", "--json"]
    skipped = [f"--skip={name}" for name in ("gpu", "dns", "ucx", "rdma")]
    done = distca("doctor", *options, *skipped, environ=environ)
    (finding,) = (
        each for each in json.loads(done.stdout)["findings"] if each["check"] == "kernels"
    )
    if hide:
        assert (done.returncode, finding["status"]) == (1, "fail")
        assert finding["says"].startswith("no C compiler: ")
        assert "install gcc and python3-dev" in finding["advice"]
    else:
        assert finding["status"] != "fail", finding
        assert list((tmp_path / "triton").rglob("*.so"))
