"""Does a test fail when a method of the proposer does nothing? `make mutants`, or `python -m tests.mutants [METHOD ...]`.

Each public method of `MtpProposer` is put out of work in two ways: it returns None, or what it was given first. The tests that
say that they show it (`@pytest.mark.shows("method ...")`, see `runtime/index.py`) have to fail then, and to pass without. Every
case is a fork of one process that has imported everything. Exit status 1 where a mutant lives.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from circuitgraph.runtime import MtpProposer
from tests.runtime.audited import Audited
from tests.runtime.index import METHODS, shown

SECONDS = 300
"""A loop that a mutant keeps from its end is ended, and counts as noticed."""


def nothing(self: Any, *given: Any, **options: Any) -> None:
    return None


def first_of(self: Any, *given: Any, **options: Any) -> Any:
    return given[0] if given else self


WAYS: dict[str, Callable[..., Any]] = {"returns None": nothing, "returns its input": first_of}
EQUIVALENT = {("block_gamma", "returns None"): "a drafter of one head has no block, and says None"}


def run(tests: Sequence[str], method: str | None, way: Callable[..., Any] | None) -> str:
    """In a fork: 'failed', 'passed', 'ended' or what else pytest's status says."""
    child = os.fork()
    if not child:
        status = 70
        try:
            # What the tests print is nobody's: a mutant fails in many ways.
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            if method is not None and way is not None:
                for kind in (MtpProposer, Audited):  # whose methods are wrapped one by one
                    setattr(kind, method, way)
            status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
        finally:
            os._exit(status)
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "passed", 1: "failed"}.get(code, f"status {code}")
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "ended"


def main(methods: Sequence[str]) -> int:
    torch.set_num_threads(1)
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        print(f"no method {', '.join(unknown)}", file=sys.stderr)
        return 2
    tests: dict[str, list[str]] = defaultdict(list)
    for what, node in shown():
        kind, _, name = what.partition(" ")
        if kind == "method":
            tests[name].append(node)
    living = []
    for method in methods or METHODS:
        outcomes = {"as it is": run(tests[method], None, None)}
        if outcomes["as it is"] != "passed":
            living.append(f"{method}: its tests do not pass as it is")
        for name, way in WAYS.items():
            if (method, name) in EQUIVALENT:
                outcomes[name] = "the same"
                continue
            outcomes[name] = run(tests[method], method, way)
            if outcomes[name] not in ("failed", "ended"):
                living.append(f"{method}: {name}")
        print(f"{method:28}", "; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items()), flush=True)
    print(f"{len(living)} live" + "".join(f"\n  {line}" for line in living))
    return 1 if living else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
