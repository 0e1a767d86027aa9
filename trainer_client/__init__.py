"""The trainer's side: sessions, the autograd operation, ping-pong, integrations."""

from core_attention.shape import AttentionShape
from trainer_client.errors import CoreAttentionFailed, PlanNotReady, SessionClosed, SessionError
from trainer_client.integrations.checkpointing import checkpoint
from trainer_client.integrations.feed import submit_ahead
from trainer_client.integrations.fsdp import prepare_fsdp
from trainer_client.integrations.host_barriers import HostBarriers
from trainer_client.options import Placement, SessionOptions
from trainer_client.session import Session
from trainer_client.step.operation import core_attention
from trainer_client.step.ping_pong import PingPong
from trainer_client.step.step_report import StepReport, TraceEvent

__all__ = [
    "AttentionShape",
    "CoreAttentionFailed",
    "HostBarriers",
    "PingPong",
    "Placement",
    "PlanNotReady",
    "Session",
    "SessionClosed",
    "SessionError",
    "SessionOptions",
    "StepReport",
    "TraceEvent",
    "checkpoint",
    "core_attention",
    "prepare_fsdp",
    "submit_ahead",
]
