"""The C and C++ compilers of this machine, which Triton and torch.compile call where they run.

Both compile code that includes ``Python.h``, and report what is missing as a traceback that ends in
their own words. Here it is named, with what to install.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_TRY_SECONDS = 30.0
"""The deadline of the preprocessor on one line, which takes a tenth of a second."""


@dataclass(frozen=True, kw_only=True)
class Language:
    """A language in which code is generated.

    Attributes:
        name: for people.
        option: of the compiler.
        variable: environment variable that names the compiler.
        programs: names of compilers that are looked for otherwise, the preferred one first.
        package: Debian's name of the compiler.
    """

    name: str
    option: str
    variable: str
    programs: tuple[str, ...]
    package: str


C = Language(name="C", option="c", variable="CC", programs=("gcc", "clang"), package="gcc")
"""The compilers that Triton looks for."""

CPP = Language(name="C++", option="c++", variable="CXX", programs=("g++",), package="g++")
"""The compilers that torch.compile looks for on the CPU."""


class Trouble(NamedTuple):
    """The reason why something does not work, and what to do about it."""

    cause: str
    advice: str


def compiler_trouble(language: Language) -> Trouble | None:
    """The reason why code that includes ``Python.h`` cannot be compiled here; None if it can."""
    install = f"install {language.package} and python3-dev"
    named = os.environ.get(language.variable)
    found = shutil.which(named) if named else _first_of(language.programs)
    if found is None and named:
        return Trouble(
            f"{language.variable} is {named!r}, and there is no such program",
            f"unset {language.variable}, or give a {language.name} compiler that is installed",
        )
    if found is None:
        looked_for = " or ".join(language.programs)
        return Trouble(f"no {language.name} compiler: there is no {looked_for} in PATH", install)
    complaint = _complaint(found, language)
    if complaint is None:
        return None
    if "Python.h" in complaint:
        python = ".".join(platform.python_version_tuple()[:2])
        return Trouble(
            f"no Python.h in {_include_folder()}: the headers of Python {python} are missing",
            f"install python3-dev, or what has the headers of {platform.python_implementation()} "
            f"{python} where this Python comes from",
        )
    return Trouble(f"the compiler {found} does not work: {complaint}", install)


def _first_of(programs: Sequence[str]) -> str | None:
    """The path of the first program that is there."""
    return next(filter(None, map(shutil.which, programs)), None)


def _include_folder() -> str:
    """The folders where ``Python.h`` is looked for."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder for what users install.
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _complaint(compiler: str, language: Language) -> str | None:
    """The first error of preprocessing an include of ``Python.h``; None if there is none."""
    command = [compiler, "-x", language.option, f"-I{_include_folder()}", "-E", "-"]
    try:
        done = subprocess.run(
            command,
            input="#include <Python.h>\n",
            capture_output=True,
            text=True,
            timeout=_TRY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)} does not end within {_TRY_SECONDS:g} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.splitlines()
    return next((line for line in lines if "error" in line), f"exit code {done.returncode}")
