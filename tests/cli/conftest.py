from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

TINY = {
    "model_type": "llama_mtp",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 1,
}


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Matrices here are tiny: a second thread costs more than it brings."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run():
    """Run a command line in this process: `run("show", "mtp_dense")`."""
    from circuitgraph.cli.app import app

    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def config_file(tmp_path_factory) -> Path:
    """A bare config: whatever is compiled from it has random weights."""
    file = tmp_path_factory.mktemp("config") / "config.json"
    file.write_text(json.dumps(TINY))
    return file


@pytest.fixture(scope="session")
def artifact(config_file, tmp_path_factory) -> Path:
    """draft 1 and 3, context 4, of a tiny head with random weights."""
    import circuitgraph

    out = tmp_path_factory.mktemp("artifact") / "tiny.cg"
    circuitgraph.compile("auto", model=config_file, out=out, widths=(3,), context_rows=(4,))
    return out
