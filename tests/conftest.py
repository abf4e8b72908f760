"""What all tests share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# How long an example takes says how busy the machine is, not whether a test is right. Health checks stay on: without a deadline
# even the one for slow draws waits for half a minute of them.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Test matrices are too small to share between threads; compiled code is told its own number where it is loaded."""
    torch.set_num_threads(1)
