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


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (TRITON_FINDS_NONE, "install gcc and python3-dev"),
        (OSError(30, "Read-only file system", "/home/me/.triton/cache/ABC"), "TRITON_CACHE_DIR"),
        (ImportError("cuda_utils.so: failed to map segment from shared object"), "noexec"),
    ],
    ids=["no compiler", "a folder that cannot be written", "a folder from which nothing runs"],
)
@pytest.mark.usefixtures("bare_path")
def test_what_triton_lacks_comes_with_its_remedy(error: Exception, advice: str) -> None:
    with pytest.raises(LauncherError) as caught:
        require_launcher(raises(error))
    assert caught.value.__cause__ is error
    assert advice in caught.value.advice


def test_a_compiler_is_judged_by_what_it_does(
    bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None under its own names, one that is named and not there, one that does not work."""
    none, gcc = compiler_trouble(C), bare_path / "gcc"
    gcc.write_text("#!/bin/sh\necho 'gcc: fatal error: cannot execute cc1' >&2\nexit 1\n")
    gcc.chmod(0o755)
    broken, no_cpp = compiler_trouble(C), compiler_trouble(CPP)
    monkeypatch.setenv("CC", "gcc-99")
    troubles = [none, broken, no_cpp, compiler_trouble(C)]
    assert len({trouble and trouble.cause for trouble in troubles} - {None}) == 4
    assert broken is not None
    assert broken.cause.endswith("cannot execute cc1")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_no_headers_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler itself says what it does not find."""
    monkeypatch.setattr(host_compiler, "_include_folder", lambda: str(tmp_path))
    trouble = compiler_trouble(C)
    assert trouble is not None
    assert f"Python.h in {tmp_path}" in trouble.cause


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
