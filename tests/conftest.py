"""What all tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Test matrices are too small to share between threads; compiled code is told its own number where it is loaded."""
    torch.set_num_threads(1)
