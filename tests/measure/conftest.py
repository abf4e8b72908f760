"""Artifacts that several files measure."""

from __future__ import annotations

import pytest

from tests.measure.small import SMALL, artifact_of


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return artifact_of("tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def eagle(tmp_path_factory):
    config = {**SMALL, "vocab_size": 300, "draft_vocab_size": 200}
    return artifact_of("eagle3-8b", tmp_path_factory.mktemp("eagle"), config=config, widths=(2,), entries=("first", "draft"))
