"""Settings for all tests."""

from __future__ import annotations

import hypothesis
import torch

# Attention nodes of the tests run with one thread each; so does this process, to share two cores.
torch.set_num_threads(1)

# A busy machine does not make a property false.
hypothesis.settings.register_profile("distca", deadline=None)
hypothesis.settings.load_profile("distca")
