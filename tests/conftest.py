"""Settings for all tests."""

from __future__ import annotations

import torch

# Attention nodes of the tests run with one thread each; so does this process, to share two cores.
torch.set_num_threads(1)
