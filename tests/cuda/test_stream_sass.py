"""What ptxas makes of a stream's copies, where `cuobjdump` is at hand."""

from __future__ import annotations

import re
import subprocess

import pytest

from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.target import Target
from tests.cuda.test_block_sass import CUOBJDUMP
from tests.cuda.test_quantised import LARGE, plan_of


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@pytest.mark.parametrize("rows", [4, 8])
def test_no_copy_has_an_address_in_two_parts(rows, tmp_path):
    """ptxas 13.0 leaves the uniform registers of such a copy, if it has a policy of L2, at zero: an illegal instruction."""
    backend = make_backend(Target("cuda", "sm_90a"))
    storage = {"lm_head": "nvfp4", "layer.ffn.down_proj": "nvfp4"}
    built = backend.build(backend.lower([plan_of(storage, rows, **LARGE)]), tmp_path)
    sass = subprocess.run([str(CUOBJDUMP), "--dump-sass", str(built.library)], capture_output=True, text=True, check=True).stdout
    assert "LDGSTS" in sass
    assert not re.search(r"LDGSTS\S* \[R\d+\+UR", sass)
