"""The trainer's side: sessions, the autograd operation, ping-pong, models, loops and frameworks.

Names are imported when they are first asked for, so that ``trainer_client.machine`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core_attention.pipelining import Pipelining as Pipelining
    from core_attention.shape import AttentionShape as AttentionShape
    from trainer_client.errors import CoreAttentionFailed as CoreAttentionFailed
    from trainer_client.errors import PlanNotReady as PlanNotReady
    from trainer_client.errors import SessionClosed as SessionClosed
    from trainer_client.errors import SessionError as SessionError
    from trainer_client.hooks.checkpointing import checkpoint as checkpoint
    from trainer_client.local_attention.at_home import at_home as at_home
    from trainer_client.loops.loss_weight import labels_per_rank as labels_per_rank
    from trainer_client.options import Placement as Placement
    from trainer_client.options import SessionOptions as SessionOptions
    from trainer_client.pipelines.deferred_weights import defer_weights as defer_weights
    from trainer_client.pipelines.pipelining import Pipeline as Pipeline
    from trainer_client.pipelines.pipelining import schedule_of as schedule_of
    from trainer_client.pipelines.stage_seconds import measure_stages as measure_stages
    from trainer_client.session import Session as Session
    from trainer_client.step.lane import in_nano_batch as in_nano_batch
    from trainer_client.step.operation import core_attention as core_attention
    from trainer_client.step.step_report import StepReport as StepReport
    from trainer_client.step.step_report import TraceEvent as TraceEvent

_MODULES = {
    "AttentionShape": "core_attention.shape",
    "CoreAttentionFailed": "trainer_client.errors",
    "Pipeline": "trainer_client.pipelines.pipelining",
    "Pipelining": "core_attention.pipelining",
    "Placement": "trainer_client.options",
    "PlanNotReady": "trainer_client.errors",
    "Session": "trainer_client.session",
    "SessionClosed": "trainer_client.errors",
    "SessionError": "trainer_client.errors",
    "SessionOptions": "trainer_client.options",
    "StepReport": "trainer_client.step.step_report",
    "TraceEvent": "trainer_client.step.step_report",
    "at_home": "trainer_client.local_attention.at_home",
    "checkpoint": "trainer_client.hooks.checkpointing",
    "core_attention": "trainer_client.step.operation",
    "defer_weights": "trainer_client.pipelines.deferred_weights",
    "in_nano_batch": "trainer_client.step.lane",
    "labels_per_rank": "trainer_client.loops.loss_weight",
    "measure_stages": "trainer_client.pipelines.stage_seconds",
    "schedule_of": "trainer_client.pipelines.pipelining",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
