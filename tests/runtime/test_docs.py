"""docs/embedding.md, run: its code blocks in order, around a small random target."""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from circuitgraph.checkpoint import load_circuit
from circuitgraph.language import shipped_programs
from circuitgraph.runtime import TRIM, BlockPool, CarriedKV, CompiledRunner, ReferenceRunner, accept_greedy
from tests.fixture_cases import target_of
from tests.runtime import families
from tests.runtime.helpers import Audited, InterpretedLibrary, Rehearsed, drafter, manifest_of, proposer_of

transformers = pytest.importorskip("transformers")

from circuitgraph.runtime.integrations.transformers import HiddenTap, generate  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"


@dataclass
class Sequence:
    tokens: list[int]
    hidden: torch.Tensor
    state: Any
    cache: Any
    limit: int


class Target:
    """What the page asks of a server's model. layers: whose outputs it hands over, () for the last one's after the norm."""

    def __init__(self, model, layers=()):
        self.model, self.layers = model, layers
        self.cache_name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"

    def _feed(self, cache, tokens):
        with torch.no_grad(), HiddenTap(self.model, "post_norm", self.layers) as tap:
            out = self.model.model(input_ids=torch.tensor([tokens]), use_cache=True, **{self.cache_name: cache})
            return tap.hidden[0], self.model.lm_head(out.last_hidden_state[0]).argmax(-1).tolist()

    def prefill(self, prompt):
        cache = transformers.DynamicCache(config=self.model.config)
        return *self._feed(cache, prompt), cache

    def verify(self, cache, tokens):
        return self._feed(cache, tokens)

    def forget(self, cache, rows):
        if rows:
            cache.crop(-rows)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=131, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def compiled(fallback: str):
    """Programs for one and two rows: three sequences run in parts."""
    manifest = manifest_of(drafter().circuit, draft=(1, 2))
    return CompiledRunner(manifest, InterpretedLibrary(manifest).functions, drafter().weights, fallback=fallback)


RUNNERS = {"reference": drafter, "split": lambda: compiled("cover"), "single": lambda: compiled("single")}
INPUT_IDS = torch.tensor([[5, 6, 7]])
PROMPTS = [[1, 2, 3], [4], list(range(20))]
QUESTION = [9, 8, 7, 6]


def blocks() -> list:
    texts = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [compile(text, str(PAGE), "exec") for text in texts]


def run_page(model, kind: type, trim: str, make, layers=()) -> dict[str, Any]:
    """The page's names, once its blocks but the last have run."""
    page = {
        "BlockPool": BlockPool,
        "CarriedKV": CarriedKV,
        "MtpProposer": functools.partial(kind, trim=trim),
        "Sequence": Sequence,
        "accept_greedy": accept_greedy,
        "input_ids": INPUT_IDS,
        "load_runner": make,
        "model": model,
        "target": Target(model, layers),
    }
    code = blocks()
    assert len(code) == 4
    for block in code[:-1]:
        exec(block, page)
    return page


def target_text(model, prompt: list[int], count: int = 20) -> list[int]:
    return prompt + generate(model, torch.tensor([prompt]), max_new_tokens=count).ids


def serve(page, running: list[Sequence]) -> None:
    """Until every sequence is at its limit; those that are leave the batch."""
    while running:
        page["step"](running, 3)
        running = [s for s in running if len(s.tokens) < s.limit]


@pytest.mark.shows("goal same text", "goal two turns", "goal page runs")
@pytest.mark.parametrize("trim", sorted(TRIM))
@pytest.mark.parametrize("make", RUNNERS)
@pytest.mark.parametrize("kind", [Rehearsed, Audited], ids=["good", "broken"])
def test_the_page_gives_the_targets_text_in_two_turns(model, trim, make, kind):
    """With a drafter that is mostly right, and with one of random weights; every trim policy, n-row and in parts."""
    page = run_page(model, kind, trim, RUNNERS[make])
    texts = [target_text(model, prompt) for prompt in PROMPTS]
    page["proposer"].texts = texts
    sequences = [page["admit"](prompt, 20) for prompt in PROMPTS]
    serve(page, list(sequences))
    assert [s.tokens for s in sequences] == texts
    carried = [page["park"](s) for s in sequences]
    assert page["pool"].ledger.loaned == sum(len(each.blocks) for each in carried)
    page["finish"](sequences.pop())  # the last one does not come back
    page["proposer"].free_drafter_kv(carried.pop())
    texts = [target_text(model, [*s.tokens, *QUESTION]) for s in sequences]
    page["proposer"].texts = texts
    before = page["proposer"].metrics.context_rows
    for s, each in zip(sequences, carried, strict=True):
        page["resume"](s, each, QUESTION, 20)
    assert page["proposer"].metrics.context_rows - before == len(sequences) * (len(QUESTION) + 1), "turn one was prefilled again"
    assert all(page["proposer"].rows_behind(s.state, len(s.tokens) - 1) == 0 for s in sequences)
    serve(page, list(sequences))
    assert [s.tokens for s in sequences] == texts
    for s in sequences:
        page["finish"](s)
    assert page["pool"].ledger.free == page["pool"].total
    if kind is Rehearsed:
        assert page["proposer"].metrics.mean_accepted_length > 1.5


def test_every_pair_comes_once_and_right(model):
    """Acceptance would not show a wrong hidden; each is compared with one forward over the whole text."""
    page = run_page(model, Rehearsed, "exact", drafter)
    texts = [target_text(model, prompt) for prompt in PROMPTS]
    page["proposer"].texts = texts
    sequences = [page["admit"](prompt, 20) for prompt in PROMPTS]
    serve(page, list(sequences))
    hiddens = [page["target"].prefill(s.tokens)[0] for s in sequences]
    for s, rows in zip(sequences, hiddens, strict=True):
        page["proposer"].check(s.state, s.tokens, rows)
    known = [len(s.tokens) - 1 for s in sequences]
    page["proposer"].texts = [target_text(model, [*s.tokens, *QUESTION]) for s in sequences]
    for s in sequences:
        page["resume"](s, page["park"](s), QUESTION, 20)
    serve(page, list(sequences))
    for s, start in zip(sequences, known, strict=True):
        page["proposer"].check(s.state, s.tokens, page["target"].prefill(s.tokens)[0], start=start)


@pytest.mark.shows("goal page runs")
def test_one_user(model):
    page = run_page(model, Audited, "exact", drafter)
    page["proposer"] = proposer_of()
    exec(blocks()[-1], page)
    assert page["result"].ids == page["plain"].ids == page["ids"][0, 3:].tolist()


# -- families ------------------------------------------------------------------------------------------------------


def target_model(name: str):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target_of(name, whole=True), dtype=torch.float32).eval()
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id = None
    return loaded


@pytest.mark.parametrize("kind", [Rehearsed, Audited], ids=["good", "broken"])
@pytest.mark.parametrize(("name", "runner"), families.CASES)
def test_the_page_serves_every_family(name: str, runner: str, kind):
    """The loop as it stands, on each family's own target: its text, its memory, and every hidden that was handed over."""
    model, made = target_model(name), families.RUNNERS[runner](name, 128)
    texts = [target_text(model, prompt) for prompt in PROMPTS]
    page = run_page(model, kind, "exact", lambda: made, made.hidden_layer_ids(model.config.num_hidden_layers))
    page["proposer"].texts = texts
    sequences = [page["admit"](prompt, 20) for prompt in PROMPTS]
    serve(page, list(sequences))
    assert [s.tokens for s in sequences] == texts
    if kind is Rehearsed:
        assert page["proposer"].metrics.mean_accepted_length > 1.5
    checked = sequences if kind is Rehearsed and made.kind.keeps_rows else []
    for s in checked:
        page["proposer"].check(s.state, s.tokens, page["target"].prefill(s.tokens)[0])
    starts = [len(s.tokens) - 1 for s in sequences]
    page["proposer"].texts = texts = [target_text(model, [*s.tokens, *QUESTION]) for s in sequences]
    for s in sequences:
        page["resume"](s, page["park"](s), QUESTION, 20)
    serve(page, list(sequences))
    assert [s.tokens for s in sequences] == texts
    for s, start in zip(checked, starts, strict=False):
        page["proposer"].check(s.state, s.tokens, page["target"].prefill(s.tokens)[0], start=start)
    for s in sequences:
        page["finish"](s)
    assert page["pool"].ledger.free == page["pool"].total


def rows_of_the_table() -> list[list[str]]:
    lines = re.search(r"^\| program \| kind .*?\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0].splitlines()[2:]  # type: ignore[index]
    return [[cell.strip() for cell in line.strip("| ").split(" |")] for line in lines if line]


def test_the_table_of_families_is_true_and_whole():
    rows = {program: row for row in rows_of_the_table() for program in row[0].split(", ")}
    assert set(rows) == set(shipped_programs())
    for program, (_, kind, source, layers, most, writes, stays, masks) in rows.items():
        circuit = load_circuit(program)
        names: list[tuple[str, Any]] = [(item.name, item.type.shape) for item in circuit.weights]
        names += [(value.name, (4, 4)) for table in circuit.tables for value in table.tensors()]
        runner = ReferenceRunner(circuit, {name: torch.empty(shape, device="meta") for name, shape in names})
        drafter = runner.kind
        assert runner.hidden_source in source.split(", ")
        assert (type(drafter).__name__.lower(), runner.hidden_layers) == (kind, int(layers))
        assert (drafter.writes(3), drafter.adds(3)) == (int(writes), int(stays))
        assert drafter.most_drafts == (int(most) if most else None)
        assert runner.masked_entries == " ".join(f"--with {entry}" for entry in masks.split(", "))
        assert {circuit.entry(entry).on_request for entry in masks.split(", ")} == {True}


@pytest.mark.parametrize("name", families.NAMES)
def test_one_user_with_every_family(name: str):
    model, runner = target_model(name), families.reference(name, 128)
    proposer = proposer_of(runner)
    result = generate(model, INPUT_IDS, proposer=proposer, num_drafts=3, max_new_tokens=32)
    assert result.ids == generate(model, INPUT_IDS, max_new_tokens=32).ids
    assert result.stats.drafts > 0
