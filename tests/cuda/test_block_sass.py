"""What ptxas makes of attention of blocks, where `cuobjdump` is at hand: on the path, or named by CUOBJDUMP."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from circuitgraph.kernels.cuda.backend import make_backend
from circuitgraph.target import Target
from tests.cuda.test_warpgroups import dflash, plan_of

CUOBJDUMP = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ +)?(\S+) *(.*?) *;")


def loop_of(kernel: str) -> list[tuple[str, str]]:
    """(instruction, operands) of the smallest loop around all products of a kernel."""
    lines = [(int(place, 16), name, operands) for place, name, operands in LINE.findall(kernel)]
    products = [place for place, name, _ in lines if name.startswith("HGMMA")]
    jumps = [
        (int(target[1], 16), place)
        for place, name, operands in lines
        if name == "BRA" and (target := re.search("0x([0-9a-f]+)", operands))
    ]
    loops = [(end - begin, begin, end) for begin, end in jumps if begin <= products[0] and end >= products[-1]]
    _, begin, end = min(loops)
    return [(name, operands) for place, name, operands in lines if begin <= place <= end]


def held(loop: list[tuple[str, str]]) -> set[int]:
    """Registers that hold queries: those that the first product, whose other side is not transposed, reads."""
    found = [re.match(r"R\d+, R(\d+), gdesc\[UR\d+\],", operands) for name, operands in loop if name.startswith("HGMMA")]
    return {int(first[1]) + index for first in found if first for index in range(4)}


def written(loop: list[tuple[str, str]]) -> set[int]:
    registers: set[int] = set()
    for name, operands in loop:
        target = re.match(r"(?:U?PT?\d*, )?R(\d+)", operands)
        if target is None or name.startswith(("ISETP", "FSETP", "VOTE", "R2UR", "BRA")):
            continue
        product = re.match(r"HGMMA\.64x(\d+)", name)
        count = (
            int(product[1]) // 2
            if product
            else 4
            if ".128" in name or name.endswith(".4")
            else 2
            if re.search(r"\.64|WIDE|CS2R", name)
            else 1
        )
        registers |= set(range(int(target[1]), int(target[1]) + count))
    return registers


def sass_of(plan, folder) -> str:
    """Of the kernel that attends."""
    backend = make_backend(Target("cuda", "sm_90a"))
    built = backend.build(backend.lower([plan]), folder)
    sass = subprocess.run([str(CUOBJDUMP), "--dump-sass", str(built.library)], capture_output=True, text=True, check=True).stdout
    (kernel,) = [text for text in sass.split("Function : ") if "tnspB" in text]
    return kernel


ARRIVAL = "UCGABAR_ARV"


def from_others(lines: list[tuple[str, str]]) -> list[int]:
    """Where sums of other blocks are loaded."""
    return [index for index, (name, _) in enumerate(lines) if name.startswith("LD.E")]


def unread(lines: list[tuple[str, str]]) -> set[int]:
    """Registers with sums of other blocks that nothing reads before the last arrival at the cluster's barrier."""
    last = max(index for index, (name, _) in enumerate(lines) if name == ARRIVAL)
    missing: set[int] = set()
    for index in from_others(lines):
        name, operands = lines[index]
        target = re.match(r"R(\d+)", operands)
        assert target is not None
        read = {int(found) for _, later in lines[index + 1 : last] for found in re.findall(r"R(\d+)", later.partition(",")[2])}
        missing |= set(range(int(target[1]), int(target[1]) + (4 if ".128" in name else 2 if ".64" in name else 1))) - read
    return missing


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@pytest.mark.parametrize("dim", [64, 128])
def test_the_loop_of_attention_keeps_the_queries(dim, tmp_path):
    """ptxas has put weights into their registers, once both products of a tile had one shape."""
    loop = loop_of(sass_of(plan_of(dflash(head_dim=dim), 16), tmp_path))
    assert len(held(loop)) == (dim // 4 if dim == 128 else 0)
    assert not held(loop) & written(loop)


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_blocks_let_go_when_they_have_added(rows, tmp_path):
    """A block that is read by others must not end: they arrive when what they add up has come."""
    lines = [(name, operands) for _, name, operands in LINE.findall(sass_of(plan_of(dflash(), rows), tmp_path))]
    assert len(from_others(lines)) > 4
    assert not unread(lines)
    last = max(index for index, (name, _) in enumerate(lines) if name == ARRIVAL)
    behind_loads = from_others(lines)[-1] + 1
    early = [*lines[:behind_loads], lines[last], *lines[behind_loads:last], *lines[last + 1 :]]
    assert unread(early)
