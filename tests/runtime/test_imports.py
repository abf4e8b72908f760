"""A serving box installs no compiler."""

import subprocess
import sys

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tvm", "networkx", "yaml", "pydantic", "typer", "rich", "tqdm", "safetensors", "transformers"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
import torch
"""

SCRIPT = """
import circuitgraph.runtime
import circuitgraph.artifact
from circuitgraph.artifact import Manifest
from circuitgraph.circuit.text import circuit_from_json
from circuitgraph.runtime import BlockPool, MtpProposer, ReferenceRunner

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


COMPILED = """
from circuitgraph.artifact import read_artifact
from circuitgraph.ops import TORCH_DTYPES
from circuitgraph.runtime import BlockPool, MtpProposer, ReferenceRunner, load

weights = {
    name: (torch.randn(spec.shape) * spec.shape[-1] ** -0.5).to(TORCH_DTYPES[spec.dtype])
    for name, spec in read_artifact(sys.argv[1]).manifest.weights.items()
}
runner = load(sys.argv[1], weights=weights, max_position=64)
hiddens, drafts = torch.randn(3, runner.hidden_size), []
for each in (runner, ReferenceRunner(runner.circuit, runner.weights)):
    proposer = MtpProposer(each, BlockPool(runner.circuit, blocks=8))
    state = proposer.alloc_state()
    proposer.prefill_drafter([1, 2, 3], hiddens, state)
    drafts.append(proposer.propose(4, hiddens[2], 3, 3, state))
print(len(drafts[0]), drafts[0] == drafts[1], dict(runner.paths))
"""


def test_a_compiled_artifact_drafts_without_compiler_packages(tmp_path):
    import circuitgraph
    from tests.fixture_cases import FIXTURES

    config = FIXTURES / "qwen3_dense_mtp" / "config.json"
    circuitgraph.compile("auto", model=config, out=tmp_path / "head", widths=(1,), context_rows=(4,))
    command = [sys.executable, "-c", BLOCK + COMPILED, str(tmp_path / "head")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3 True {'n-row': 1}"


def test_the_runtime_drafts_without_compiler_packages():
    from tests.runtime.helpers import drafter, manifest_of

    manifest = manifest_of(drafter().circuit).to_text()
    done = subprocess.run([sys.executable, "-c", BLOCK + SCRIPT], input=manifest, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"


def test_the_gpu_bench_needs_no_compiler_packages(tmp_path):
    """It runs on the machine that has the GPU, which is not the one that compiles."""
    script = f"{BLOCK}\nfrom circuitgraph.measure.cuda import main\nsys.exit(main([sys.argv[1]]))"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "none: " in done.stderr
