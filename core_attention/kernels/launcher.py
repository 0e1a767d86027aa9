"""Triton's launcher: a library that Triton compiles where it launches the first kernel.

Triton calls the machine's C compiler for it, and keeps the result in a folder, from which later
processes load it. Kernels make it before their first launch, so that a machine which cannot make it
is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

from core_attention.host_compiler import C, Trouble, compiler_trouble

_IMAGES = "or use the images built with VARIANT=cuda, which have it"


class LauncherError(RuntimeError):
    """Triton's launcher cannot be made or loaded on this machine.

    Attributes:
        cause: what is missing.
        advice: what to do.
    """

    def __init__(self, trouble: Trouble) -> None:
        self.cause, self.advice = trouble
        super().__init__(f"{self.cause}; {self.advice}")


def _load() -> None:
    """Has Triton make its launcher, or load the one that it has kept."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # Triton makes it when the driver of this machine's device is asked for.
    _ = triton.runtime.driver.active.utils


def require_launcher(load: Callable[[], object] = _load) -> None:
    """Makes the launcher, unless it is there. A second the first time on a machine.

    Args:
        load: makes it.

    Raises:
        ImportError, LauncherError: it cannot be made or loaded.
    """
    try:
        load()
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise LauncherError(_trouble(error)) from error


def _trouble(error: Exception) -> Trouble:
    """The cause of ``error``, which loading the launcher raised."""
    if isinstance(error, OSError) and error.filename and not isinstance(error, FileNotFoundError):
        return Trouble(
            f"Triton keeps its launcher in {error.filename}, which cannot be written "
            f"({error.strerror})",
            "set TRITON_CACHE_DIR, or HOME, to a folder that can be written",
        )
    if isinstance(error, ImportError):
        return Trouble(
            f"Triton's launcher cannot be loaded: {error}",
            "set TRITON_CACHE_DIR to a folder from which libraries can be loaded, which a file "
            "system mounted with noexec does not allow",
        )
    trouble = compiler_trouble(C)
    if trouble is not None:
        return Trouble(
            f"{trouble.cause}; Triton compiles a launcher at its first use",
            f"{trouble.advice}, {_IMAGES}",
        )
    return Trouble(
        f"Triton's launcher cannot be made: {type(error).__name__}: {error}",
        "check the driver with nvidia-smi and its libcuda.so.1 with ldconfig -p",
    )
