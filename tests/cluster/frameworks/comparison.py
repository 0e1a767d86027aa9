"""Cases of a framework: losses and gradients of each step, served and by float64 attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from core_attention.manifest import RankManifest
from trainer_client import Session


def watched(session: Session) -> list[RankManifest]:
    """What it submits from now on."""
    submitted: list[RankManifest] = []
    submit = session.submit

    def also(manifest: RankManifest, *, forward_only: bool = False) -> None:
        submitted.append(manifest)
        submit(manifest, forward_only=forward_only)

    session.submit = also  # type: ignore[method-assign]
    return submitted


def has_cut_documents(manifest: RankManifest) -> bool:
    """Whether any document begins in one half and goes on in the other."""
    begun = [any(s.offset for s in segments) for segments in manifest.nano_batches]
    assert not any(begun[::2])
    return any(begun)


def assert_same(
    found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], *where: object
) -> None:
    """Compares a step's loss and all gradients, element by element.

    Args:
        found: by name; models that compute in float32.
        right: likewise.
        where: names the step in errors.
    """
    assert found.keys() == right.keys(), where
    assert any(bool(value.any()) for value in right.values()), where
    for name, value in found.items():
        # float32 sums of some hundred terms, in another order.
        torch.testing.assert_close(
            value,
            right[name],
            rtol=2e-4,
            atol=2e-5 * float(right[name].abs().max()),
            check_dtype=False,
            msg=partial(str.__add__, f"{(*where, name)}: "),
        )
