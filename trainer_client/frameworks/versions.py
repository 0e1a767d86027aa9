"""The common part of the frameworks' integrations: versions, refusals, ranks, models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn

from trainer_client.errors import SessionError


class UnsupportedSetting(SessionError):
    """Served core attention cannot work with this version or setting of a framework."""


def require_version(distribution: str, at_least: str, below: str, extra: str) -> None:
    """Checks that a framework is installed, with a version in ``[at_least, below)``.

    Args:
        distribution: its name on PyPI.
        at_least: the lowest version that is served.
        below: the lowest one above that is not.
        extra: of distca, which installs a right one.
    """
    valid = f"{distribution} from {at_least} up to, but without, {below}"
    remedy = f"run: pip install 'distca[{extra}]'"
    try:
        found = version(distribution)
    except PackageNotFoundError:
        raise UnsupportedSetting(
            f"{distribution} is not installed; this integration needs {valid}; {remedy}"
        ) from None
    if not _numbers(at_least) <= _numbers(found) < _numbers(below):
        raise UnsupportedSetting(
            f"{distribution} {found} is installed; this integration needs {valid}; {remedy}"
        )


def refuse(problems: Iterable[str], framework: str) -> None:
    """Raises if there are problems.

    Args:
        problems: each names a setting, its value, and what to do.
        framework: in the message.
    """
    if found := list(problems):
        raise UnsupportedSetting(
            f"{framework} cannot train with served core attention as it is set up: "
            + "; ".join(found)
        )


def _numbers(text: str) -> tuple[int, ...]:
    """The release of a version: 0.19.2rc1 is 0.19.2."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()


def of_all_ranks(reasons: Iterable[str]) -> list[str]:
    """The reasons of this rank and all others, each once; all ranks call it together."""
    found = list(reasons)
    of_each = [found]
    if dist.is_initialized():
        of_each = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_each, found)
    return list(dict.fromkeys(chain.from_iterable(of_each)))


def rank_options(
    stage: tuple[int, int], replica: tuple[int, int], share: tuple[int, int]
) -> dict[str, Any]:
    """Options of a session that say which rank of the job a process is: pipeline stages one after
    another, in each all replicas, in each all tensor-parallel ranks.

    Args:
        stage, replica, share: (this rank's, how many); share of the heads.
    """
    first = (stage[0] * replica[1] + replica[0]) * share[1]
    return {
        "rank": first + share[0],
        "n_ranks": stage[1] * replica[1] * share[1],
        "tensor_parallel_ranks": range(first, first + share[1]) if share[1] > 1 else (),
    }


def convolutions(model: nn.Module) -> list[str]:
    """The modules of ``model`` that look at neighbouring tokens, which may be in another half."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
