"""Options of a session that serves a model of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer_client import SessionOptions
from trainer_client.environment import session_options
from trainer_client.models.found_options import options_of_model


def options_for(model: nn.Module, **options: Any) -> SessionOptions:
    """Those that are given, and those that follow from ``model``."""
    return session_options(**options_of_model(model, options))
