"""A serving box installs no compiler."""

import subprocess
import sys

SCRIPT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tvm", "networkx", "yaml", "pydantic", "typer", "rich", "tqdm", "safetensors", "transformers"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
import circuitgraph.runtime
import circuitgraph.artifact
from circuitgraph.artifact import Manifest
from circuitgraph.circuit.text import circuit_from_json
from circuitgraph.runtime import BlockPool, MtpProposer, ReferenceRunner
import torch

manifest = Manifest.from_text(sys.stdin.read())
shapes = {name: spec.shape for name, spec in manifest.weights.items()}
weights = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
weights |= {"rope.cos": torch.ones(64, 4), "rope.sin": torch.zeros(64, 4)}
runner = ReferenceRunner(manifest.circuit, weights)
proposer = MtpProposer(runner, BlockPool(runner.circuit, blocks=8))
state = proposer.alloc_state()
proposer.prefill_drafter([1, 2, 3], torch.randn(3, 48), state)
print(len(proposer.propose(4, torch.randn(48), 3, 3, state)))
"""


def test_the_runtime_drafts_without_compiler_packages():
    from tests.runtime.helpers import drafter, manifest_of

    manifest = manifest_of(drafter().circuit).to_text()
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=manifest, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"
