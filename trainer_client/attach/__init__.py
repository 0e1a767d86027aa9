"""The one door: a model is attached once, and its user's own loop trains it."""

from trainer_client.attach.attached import Attached, attach, log_scalars

__all__ = ["Attached", "attach", "log_scalars"]
