"""What has to be shown of the proposer, and which tests say that they show it (`@pytest.mark.shows`).

The lists are those of the specification: every row of the proposer's table of methods, its rules, the kinds of fault that
drafters had elsewhere, and what the whole has to reach. `test_index` fails when one has no test; `tests.mutants` makes each
method do nothing and expects its tests to fail.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

METHODS = (
    "alloc_state", "alloc_state_for", "propose", "propose_batch", "propose_batch_max", "prefill_drafter", "prefill_hidden_rows",
    "prefill_uses_shared_buffers", "needs_comm", "block_gamma", "drafter_rows", "rows_behind", "last_pair_key", "catchup_drafter",
    "catchup_batch", "catchup_accepted", "after_verify", "settle", "take_drafter_kv", "install_drafter_kv", "free_drafter_kv",
    "free_state", "last_confidence", "read_deferred_draft_token", "circuit_draft", "set_circuit_draft",
)  # fmt: skip

RULES = {
    1: "everything is checked before anything changes; a refusal or an exception leaves all as it was",
    2: "two sequences never share a row, block or scratch slot; padded or finished rows write nowhere",
    3: "slots are reserved before a propose, and what was not used goes back; the ledger balances after every call",
    4: "an exhausted pool gives no drafts and is counted; nobody's rows are evicted",
    5: "past the position limit drafting stops; nothing is clamped",
    6: "grammars: one bitmask a row, a fresh one per draft from a matcher, which is rolled back; nothing allowed, no draft",
    7: "ids that leave are the target's, and so are a mask's",
    8: "a stop id ends its chain, and its surplus rows go",
    9: "same inputs, same bits, whatever else is there",
    10: "a chain waits for the host only where a stop or a matcher asks",
    11: "confidences of every draft, from every width; cutting drafts by them",
    12: "calls on one proposer wait for each other",
}

PITFALLS = {
    "own hiddens kept": "KV of the drafter's own hiddens was never overwritten by the target's",
    "map of another layout": "a token-to-request map of one layout was used for another: sequences read each other's cache",
    "lookahead rows leak": "no slots for the rows of K drafts, or reserved and not counted when released",
    "trim skipped": "the server cut the drafts, and the drafter was out of step for ever after",
    "carry kept once": "the pending pair kept once for all sequences, leaks on slot reuse",
    "KV of another life": "KV installed under another model, another session, or past the common prefix",
    "first rows": "position 0, the first row, one-token prompts, prompts of a block and one more or less",
    "chunk edges": "the last row of a chunk pairs with the first token of the next",
    "hiddens never given": "prefix-cached tokens without hiddens: rows held < rows expected is visible",
    "pool size": "sized for one sequence, for the ceiling times n, or counted twice; bytes are published",
    "pool ran out": "the loop crashed, or the reservation was so pessimistic that it evicted others",
}
"""Of the sections "KV, positions, rejection" and "Memory"."""

GOALS = {
    "random interleavings": "10,000 random operations against a dense cache, block sizes 1, 8, 16",
    "no tensors": "state bookkeeping allocates no tensors per call",
    "two turns": "carried KV drafts from the first token of turn two as a full prefill would",
    "device form": "the device form of propose_batch gives the host form's drafts",
    "shadow pool": "rows at a foreign host's slots: random maps, missing leading rows, late rows",
    "same text": "greedy text in fp32 is plain decoding's for every policy, width path and a broken drafter",
    "page runs": "docs/embedding.md's loop is code that runs",
}

MEASURED = {
    "tests/gpu/test_lifecycle.py": ("test_random_interleavings", "test_the_device_form_never_waits", "test_the_control_waits"),
    "docs/performance.md": ("Trim policies", "95 % interval", "A second turn", "propose_batch"),
}
"""What a GPU or a trained head shows: files, and what must be in them."""


def wanted() -> set[str]:
    return {
        *(f"method {name}" for name in METHODS),
        *(f"rule {number}" for number in RULES),
        *(f"pitfall {kind}" for kind in PITFALLS),
        *(f"goal {name}" for name in GOALS),
    }


def shown() -> Iterator[tuple[str, str]]:
    """(what, node id) of every mark, whichever tests are selected now."""
    folder = Path(__file__).parent
    for file in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(f"{__package__}.{file.stem}")
        for name, function in vars(module).items():
            if name.startswith("test_") and inspect.isfunction(function) and function.__module__ == module.__name__:
                for mark in getattr(function, "pytestmark", ()):
                    if mark.name == "shows":
                        yield from ((what, f"tests/runtime/{file.name}::{name}") for what in mark.args)
