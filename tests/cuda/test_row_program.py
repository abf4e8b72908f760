"""Which elements a row-wise kernel reads, in the generated text."""

from __future__ import annotations

import re

from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.language import Bindings, load_program, resolve
from circuitgraph.pipeline import Run, plan_piece
from circuitgraph.plan.schedule import load_schedule
from circuitgraph.target import parse_target

TARGET = parse_target("cuda:sm_90a")
PROGRAM = """\
program: whole_row_norm
doc: A norm over whole rows, whose result is cut into heads and rotated.
dims:
  H: hidden_size
  A: heads
  D: head_dim
inputs:
  hidden: "act[n, H]"
  position: i32[n]
tables:
  rope: {kind: rope, dim: D}
weights:
  weight: "wt[H]"
body:
  - normed = rms_norm(hidden, weight, eps=0.000001, flavour=plain)
  - q = heads(normed, count=A)
  - turned = rope(q, position, rope.cos, rope.sin, style=half)
outputs:
  turned: turned
entries:
  draft: {rows: sequences, outputs: [turned]}
"""


GATED = """\
program: gated_heads
doc: The sigmoid of each element of heads.
dims:
  H: hidden_size
  A: heads
inputs:
  hidden: "act[n, H]"
body:
  - q = heads(hidden, count=A)
  - gate = sigmoid(q)
outputs:
  gate: gate
entries:
  draft: {rows: sequences, outputs: [gate]}
"""


def body_of(program, folder):
    """The text of the one kernel of two rows."""
    (folder / "p.yaml").write_text(program)
    bindings = Bindings({"hidden_size": 512, "heads": 4, "head_dim": 128}, {}, act="bf16", wt="bf16", kv="bf16")
    circuit = resolve(load_program(folder / "p.yaml"), bindings)
    plan = plan_piece(Run(), circuit, "draft", 2, TARGET.of_plans, load_schedule("cuda"))
    backend = make_backend(TARGET)
    (source,) = backend.sources(backend.lower([plan]))
    kernel = re.search(r"__global__ [^;{]*draft_2_kernel[^;{]*\{(.*?)\n\}", source, flags=re.S)
    assert kernel is not None
    return kernel[1]


def test_all_loads_of_a_thread_come_before_its_first_store(tmp_path):
    """None can pass a store: of a gate, an element after the other would wait for its load."""
    loads, stores = (body_of(GATED, tmp_path).split(f"{name}_ptr[") for name in ("hidden", "gate"))
    assert len(loads) == len(stores) == 512 // 4 // 32 + 1
    assert "hidden_ptr[" not in "".join(stores[1:])


def test_a_norm_over_the_row_sums_the_row_wherever_a_head_asks(tmp_path):
    # Before the root the sum of squares reads the row, column by column: no head in it.
    squares = body_of(PROGRAM, tmp_path).split("rsqrt")[0]
    reads = re.findall(r"hidden_ptr\[(.*)\]\)", squares)
    assert len(reads) >= 512 // 32
    assert all(re.fullmatch(r"\(\(\w+\[0\] \* 512\) \+ \w+\[0\]\)", read) for read in reads), reads
