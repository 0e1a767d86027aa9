"""What becomes of every causal language model of transformers: run tiny, beside local attention.

``python -m tests.cluster.trainer_client.model_sweep`` runs all of them and writes the table of
docs/models.md; ``test_model_families.py`` runs them again and compares. Servers are not needed:
what they would compute is computed in their place, on the rows and the documents that would be
sent; layers at home run as in training.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto

from core_attention.ca_task import MaskKind
from core_attention.manifest import Manifest, RankManifest
from core_attention.shape import AttentionShape
from core_attention.tensor_checks import check_qkv
from tests import ROOT
from tests.support.gradients import assert_gradients
from tests.support.tiny_models import FAMILIES, VOCABULARY, tiny_config
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.models.transformers import UnsupportedModel, check_documents
from trainer_client.step import operation
from trainer_client.step.home import HomeCall, attend_at_home
from trainer_client.step.home_tasks import LayerKind, home_tasks
from trainer_client.step.lane import Lane, current_lane, require_lane

LENGTHS = [9, 1, 14]

PAGE = ROOT / "docs" / "models.md"

SERVED = "**served**: every layer"
BIDIRECTIONAL = "**served**: every layer, bidirectional"
FULL_LAYERS = "**served** in the full layers, the others at home"
ONE_DOCUMENT = "**one document a nano-batch**"
REFUSED = "refused"
NOT_TRIED = "not tried: transformers does not build or run it so small"


def make_model(config: PretrainedConfig, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(
        copy.deepcopy(config), attn_implementation=implementation
    )
    model.train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Not initialised by some families, and zero in others: either would hide them.
            if "sink" in name:
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return model


class PlannedStep:
    """What core attention asks of a running step: one nano-batch of LENGTHS."""

    step = 0
    rank = 0

    def __init__(
        self, shape: AttentionShape, scale: float, lengths: Sequence[int] = LENGTHS
    ) -> None:
        self.job = SimpleNamespace(shape=shape, scale=scale, n_nano_batches=1, windows=())
        manifest = Manifest.merge([RankManifest.from_lengths(0, 0, (lengths,))], 1)
        self.plan = SimpleNamespace(manifest=manifest)
        self.lengths = list(lengths)
        self.calls = 0
        self.checks: list[Callable[[], None]] = []

    def segments(self, nano_batch: int) -> list[tuple[int, int, int]]:
        assert nano_batch == 0
        begins = np.cumsum(self.lengths) - self.lengths
        return [(b, 0, n) for b, n in zip(begins.tolist(), self.lengths, strict=True)]

    def n_rows(self, nano_batch: int) -> int:
        return sum(self.lengths)

    def carried(self, nano_batch: int) -> tuple[tuple[int, int], ...]:
        return ()

    def home_call(self, nano_batch: int) -> str:
        return "a layer at home"

    def check_at_end(self, check: Callable[[], None]) -> None:
        self.checks.append(check)


def _serve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    checkpoints: Checkpoints,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of servers."""
    step: Any = require_lane().running
    shape = step.job.shape
    check_qkv(q, k, v, shape, step.n_rows(0))
    step.calls += 1
    rule = replace(shape.rule, window=window)
    call = HomeCall(home_tasks(step, 0, LayerKind(window)), rule, step.job.scale)
    o, lse, _ = attend_at_home(q, k, v, step.n_rows(0), call, lambda o, lse: None)
    return o, lse


@contextmanager
def served_here(step: PlannedStep) -> Iterator[None]:
    """In the block core attention computes ``step``."""
    running: Any = step
    token = current_lane.set(Lane.of(running, 0))
    try:
        with mock.patch.object(operation, "_served", _serve):
            yield
        for check in step.checks:
            check()
    finally:
        current_lane.reset(token)


def run_packed(model: PreTrainedModel, step: PlannedStep) -> torch.Tensor:
    """Logits ``[rows, vocabulary]`` of the packed documents."""
    positions = torch.cat([torch.arange(length) for length in step.lengths])
    with served_here(step):
        output = model(
            input_ids=tokens(step.lengths)[None].to(model.device),
            position_ids=positions[None].to(model.device),
            use_cache=False,
        )
    logits: torch.Tensor = output.logits[0]
    return logits


def tokens(lengths: Sequence[int] = LENGTHS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(8, VOCABULARY, (sum(lengths),), generator=generator)


def run_alone(model: PreTrainedModel, lengths: Sequence[int] = LENGTHS) -> torch.Tensor:
    """The same documents, each in a row of its own, with attention of transformers."""
    return torch.cat(
        [
            model(
                input_ids=ids[None],
                position_ids=torch.arange(len(ids), device=model.device)[None],
                use_cache=False,
            ).logits[0]
            for ids in tokens(lengths).to(model.device).split(list(lengths))
        ]
    )


def loss_of(logits: torch.Tensor, lengths: Sequence[int] = LENGTHS) -> torch.Tensor:
    """Cross entropy of the next tokens of the same document, summed, in float64."""
    return sum(
        (
            nn.functional.cross_entropy(rows[:-1].double(), ids[1:], reduction="sum")
            for rows, ids in zip(
                logits.split(list(lengths)),
                tokens(lengths).to(logits.device).split(list(lengths)),
                strict=True,
            )
            if len(ids) > 1
        ),
        torch.zeros((), dtype=torch.float64, device=logits.device),
    )


def planned_step(model: PreTrainedModel, lengths: Sequence[int] = LENGTHS) -> PlannedStep:
    """A step of a session that is opened for the model."""
    check = check_documents(model)
    (call, *others) = check.served_calls()
    for other in others:
        if (other.shape, other.scale) != (call.shape, call.scale):
            raise UnsupportedModel(f"layers of different shapes are served: {call}, {other}")
    step = PlannedStep(call.shape, call.scale, lengths)
    step.job.windows = () if call.kind.is_full else (call.kind.window,)
    return step


def assert_right(config: PretrainedConfig, lengths: Sequence[int] = LENGTHS) -> None:
    """Loss and gradients of packed documents are those of each document alone."""
    model, local = make_model(config, "distca"), make_model(config, "eager")
    local.load_state_dict(model.state_dict())
    step = planned_step(model, lengths)
    loss = loss_of(run_packed(model, step), lengths)
    expected = loss_of(run_alone(local, lengths), lengths)
    loss.backward()
    expected.backward()
    assert step.calls > 0
    assert abs(loss.item() - expected.item()) <= 1e-6 * abs(expected.item())
    # float32 through two layers: some thousand roundings of 6e-8.
    assert_gradients(model, local, 1e-3, config.model_type, floor=1e-3)


@dataclass(frozen=True)
class Outcome:
    """What became of a family.

    Attributes:
        kind: one of the kinds above.
        cause: why, where it is not served.
    """

    kind: str
    cause: str = ""


def outcome_of(family: str) -> Outcome:
    """Builds a tiny model of ``family``, and trains it for a step if it may be.

    Raises:
        AssertionError: its loss or gradients are wrong.
    """
    try:
        config = tiny_config(family)
        run_alone(make_model(config, "eager"))
    except Exception:
        return Outcome(NOT_TRIED)
    try:
        check = check_documents(make_model(config, "distca"))
        if check.fault:
            assert_right(config, LENGTHS[-1:])
            return Outcome(ONE_DOCUMENT, cause_of(check.fault))
        assert_right(config)
    except UnsupportedModel as error:
        return Outcome(REFUSED, cause_of(str(error)))
    served = check.served_calls()
    if served[0].shape.mask is MaskKind.FULL:
        return Outcome(BIDIRECTIONAL)
    at_home = len(check.calls) > len(served)
    return Outcome(FULL_LAYERS if at_home else SERVED)


CAUSES = {
    "ignores position_ids": "positions ignore `position_ids`",
    "neighbours in the row": "recurrent or convolutional layers cross documents",
    "index_topk": "keys chosen by an index",
    "position_bias": "position biases",
    "is_causal=False": "not causal",
    "different shapes": "full layers of different shapes",
    "calls no attention": "no attention",
    "ALiBi": "ALiBi biases, by attention of its own",
    "under torch.no_grad": "calls without gradients above those that train",
    "computes attention by itself": "no attention that is looked up by name",
    "attention_mask=tensor": "a mask of its own",
    "is of type": "its config and its masks differ",
    "17 rows of key": "pooled keys",
}


def cause_of(message: str) -> str:
    for pattern, cause in CAUSES.items():
        if pattern in message:
            return cause
    return message


def table(outcomes: dict[str, Outcome]) -> str:
    """The rows of docs/models.md."""
    lines = ["| | model types |", "|---|---|"]
    order = (SERVED, BIDIRECTIONAL, FULL_LAYERS, ONE_DOCUMENT, REFUSED, NOT_TRIED)
    groups = sorted(set(outcomes.values()), key=lambda o: (order.index(o.kind), o.cause))
    for group in groups:
        title = f"{group.kind}: {group.cause}" if group.cause else group.kind
        names = ", ".join(sorted(name for name, o in outcomes.items() if o == group))
        lines.append(f"| {title} | {names} |")
    return "\n".join(lines)


def documented() -> dict[str, Outcome]:
    """What docs/models.md says of each family."""
    outcomes = {}
    for title, names in re.findall(r"^\| (\S.*?) \| (.*) \|$", PAGE.read_text(), re.M):
        for kind in (SERVED, BIDIRECTIONAL, FULL_LAYERS, ONE_DOCUMENT, REFUSED, NOT_TRIED):
            if title == kind or title.startswith(f"{kind}: "):
                outcome = Outcome(kind, title.removeprefix(kind).removeprefix(": "))
                outcomes.update(dict.fromkeys(names.split(", "), outcome))
                break
    return outcomes


def served_families() -> list[str]:
    """Those of the page whose packed documents are served and that the installed release has."""
    kinds = (SERVED, BIDIRECTIONAL, FULL_LAYERS)
    known = configuration_auto.CONFIG_MAPPING
    return sorted(name for name, o in documented().items() if o.kind in kinds and name in known)


def main() -> None:
    """Tries the families that are named, or all; writes the page if all were tried."""
    torch.set_num_threads(1)
    outcomes: dict[str, Outcome] = {}
    for family in sys.argv[1:] or FAMILIES:
        try:
            outcomes[family] = outcome_of(family)
        except Exception as error:
            print(f"{family}: WRONG: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{family}: {outcomes[family].kind}: {outcomes[family].cause}", flush=True)
    if sys.argv[1:]:
        return
    page = re.sub(
        r"^\| \| model types \|\n(\|.*\n)+", table(outcomes) + "\n", PAGE.read_text(), flags=re.M
    )
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
