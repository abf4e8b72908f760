"""Every family through the proposer, against values that other people's code computed: interpreted and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from circuitgraph.checkpoint import bind, default_config, load_circuit
from circuitgraph.circuit.ir import Node
from circuitgraph.errors import RuntimeUseError
from circuitgraph.ops import PagedKV
from circuitgraph.runtime import DEFERRED, BlockPool, ReferenceRunner, load, own_ids
from circuitgraph.runtime.kinds import Block, Heads
from tests.fixture_cases import FIXTURES, fixture_tensors, target_of
from tests.runtime.audited import Audited
from tests.runtime.dense import dense_of
from tests.runtime.families import CASES, EAGLE3_HEADS, NAMES, RUNNERS, artifact, reference
from tests.runtime.goldens import Text, golden, prefilled, propose
from tests.runtime.grammars import CountingMatcher, bits_of, words_of

cases = pytest.mark.parametrize(("name", "kind"), CASES)
families = pytest.mark.parametrize("name", NAMES)


def proposer_for(name: str, kind: str = "reference", *, blocks: int = 32, block_size: int = 4, **options) -> Audited:
    runner = RUNNERS[kind](name)
    return Audited(runner, BlockPool(runner.circuit, blocks=blocks, block_size=block_size), **options)


def close(got, want: torch.Tensor, bound: float = 1e-4) -> None:
    torch.testing.assert_close(torch.as_tensor(got).float(), want.float(), rtol=0, atol=bound)


def rows_of(proposer: Audited, state, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some rows, [layers, rows, heads, dim]."""
    slots = torch.tensor(proposer.pool.slots(state.lease, first, last - first))
    block, offset = slots // proposer.pool.block_size, slots % proposer.pool.block_size
    return tuple(part[:, block, :, offset].transpose(0, 1) for part in proposer.pool.storage["kv"])  # type: ignore[return-value]


# -- golden values -------------------------------------------------------------------------------------------------


@cases
@pytest.mark.parametrize("chunk", [99, 5])
def test_drafts_after_a_prompt(name: str, kind: str, chunk: int) -> None:
    proposer, text = proposer_for(name, kind), golden(name).one
    state = prefilled(proposer, text, chunk)
    drafts, scores = propose(proposer, [text], [state], len(text.drafts))
    assert drafts == [text.drafts]
    close(scores[0], text.scores)
    alone = proposer_for(name, kind)
    state = prefilled(alone, text)
    assert alone.propose(text.tokens[-1], text.hiddens[-1], len(text.tokens) - 1, 2, state) == text.drafts[:2]


@cases
def test_three_sequences_of_unequal_length_at_once(name: str, kind: str) -> None:
    proposer, texts = proposer_for(name, kind), golden(name).three
    states = [prefilled(proposer, text) for text in texts]
    drafts, scores = propose(proposer, texts, states, len(texts[0].drafts))
    assert drafts == [text.drafts for text in texts]
    for made, text in zip(scores, texts, strict=True):
        close(made, text.scores)
    assert set(proposer.metrics.paths) == {"reference" if kind == "reference" else "n-row"}


@cases
def test_catching_up_after_a_verify(name: str, kind: str) -> None:
    """Two drafts accepted: their rows come from the target's hiddens, and the next proposal goes on from there."""
    proposer, cases = proposer_for(name, kind), golden(name)
    before, after = cases.one, cases.after
    state = prefilled(proposer, before)
    propose(proposer, [before], [state], 4)
    proposer.after_verify(2, state)
    start, newest = len(before.tokens), len(after.tokens) - 1
    missing = proposer.rows_behind(state, newest)
    assert missing == (0 if name == "medusa1" else 2)
    wrote = proposer.catchup_batch([after.tokens[start:newest]], [after.hiddens[start - 1 : newest - 1]], [start], [state])
    assert wrote == missing
    drafts, scores = propose(proposer, [after], [state], len(after.drafts))
    assert drafts == [after.drafts]
    close(scores[0], after.scores)
    if name != "medusa1":
        want, (keys, values) = fixture_tensors(name), rows_of(proposer, state, start - 1, newest - 1)
        for key, made in {"d.k": keys, "d.k_tpos": keys, "d.v": values}.items():
            if key in want:
                rows = want[key][..., :2, :, :]
                close(made.reshape(rows.shape), rows, 1e-5)


# -- drafts, masks, ends -------------------------------------------------------------------------------------------


def scores_of(name: str, text: Text, steps: int) -> torch.Tensor:
    """What `steps` drafts along the proposer's own are chosen from, in the target's ids, by the dense oracle: [steps, T]."""
    oracle = dense_of(RUNNERS["reference"](name), "exact")
    judged: list[torch.Tensor] = []
    oracle._judge = lambda step, draft, logits, *_: judged.append(oracle.in_target_ids(logits.float()))  # type: ignore[method-assign]
    newest = len(text.tokens) - 1
    oracle.append(1, text.tokens[1:newest], text.hiddens[: newest - 1])
    oracle.follow(text.tokens[-1], text.hiddens[-1], newest, text.drafts[:steps])
    return torch.stack(judged)


@cases
def test_fewer_drafts_are_the_first_of_many(name: str, kind: str) -> None:
    proposer, text = proposer_for(name, kind), golden(name).one
    for count in range(len(text.drafts) + 1):
        state = prefilled(proposer, text)
        assert propose(proposer, [text], [state], count)[0] == [text.drafts[:count]]
        assert proposer.drafter_rows(state) == (
            0 if name == "medusa1" else 13 - (name == "dflash_qwen3") + rows_added(name, count)
        )
        proposer.free_state(state)
    assert proposer.pool.ledger.free == proposer.pool.total


def rows_added(name: str, count: int) -> int:
    return min(count, 1) if name == "dflash_qwen3" else count


@families
def test_more_drafts_than_there_can_be(name: str) -> None:
    proposer, text = proposer_for(name), golden(name).one
    made = propose(proposer, [text], [prefilled(proposer, text)], 12)[0][0]
    assert len(made) == {"medusa1": 4, "dflash_qwen3": 7}.get(name, 12)
    assert proposer.block_gamma() == (8 if name == "dflash_qwen3" else None)


@cases
def test_a_mask_allows_only_the_targets_ids_that_it_names(name: str, kind: str) -> None:
    """The best of three tokens, and its log-probability among them: tokens that cannot be drafted do not count."""
    proposer, text = proposer_for(name, kind), golden(name).one
    if not proposer.runner.serves(1, masked=True):
        pytest.skip("not compiled for masks")
    scores = scores_of(name, text, 1)[0]
    allowed = [int(token) for token in scores.topk(9).indices[[3, 6, 8]]]
    impossible = [token for token in range(512) if scores[token] == -float("inf")][:4]
    mask = words_of({*allowed, *impossible}, 512)
    made: list[list[float]] = []
    state = prefilled(proposer, text)
    newest = len(text.tokens) - 1
    drafts = proposer.propose_batch(
        text.tokens[-1:], text.hiddens[-1:], [newest], 1, [state], grammars=[mask], out_confidence=made
    )
    assert drafts == [[allowed[0]]]
    close(made[0][0], scores[allowed].log_softmax(0)[0])
    proposer.after_verify(0, state)
    only = words_of(set(impossible), 512)
    nothing = prefilled(proposer, text)
    assert proposer.propose(text.tokens[-1], text.hiddens[-1], newest, 3, nothing, grammar=only) == [] or not impossible
    assert bool(impossible) == (name in EAGLE3_HEADS)


@families
def test_a_matcher_is_asked_for_each_draft_and_rolled_back(name: str) -> None:
    proposer, text = proposer_for(name), golden(name).one
    matcher = CountingMatcher(512, 3, ends=3)
    state = prefilled(proposer, text)
    before = proposer.runner.paths["reference"]
    drafts = proposer.propose(text.tokens[-1], text.hiddens[-1], len(text.tokens) - 1, 4, state, grammar=matcher)
    assert 1 <= len(drafts) <= 3
    assert matcher.depth == 0
    for words, draft in zip(matcher.along(drafts), drafts, strict=True):
        assert bits_of(words, 512)[draft]
    if name in ("medusa1", "dflash_qwen3"):
        scores = scores_of(name, text, 4)
        for step, words in enumerate(matcher.along(drafts)):
            assert drafts[step] == int(scores[step].masked_fill(~bits_of(words, 512), -float("inf")).argmax())
        assert proposer.runner.paths["reference"] - before <= 2, "a forward a draft"


@cases
def test_a_stop_id_and_a_low_confidence_end_the_drafts(name: str, kind: str) -> None:
    proposer, text = proposer_for(name, kind), golden(name).one
    newest, want = len(text.tokens) - 1, text.drafts[:4]
    state = prefilled(proposer, text)
    stop = want[1]
    ends = want.index(stop) + 1
    assert proposer.propose(text.tokens[-1], text.hiddens[-1], newest, 4, state, stop_ids={stop}) == want[:ends]
    lowest = float(text.scores[:2].max()) + 1e-3  # above the first two
    again = prefilled(proposer, text)
    threshold = min(float(torch.tensor(lowest).exp()), 1.0)
    assert proposer.propose(text.tokens[-1], text.hiddens[-1], newest, 4, again, stop_confidence=threshold) == want[:1]
    assert proposer.last_confidence(again) == pytest.approx(float(text.scores[0].exp()), rel=1e-3)


@cases
def test_the_last_draft_may_stay_on_the_device(name: str, kind: str) -> None:
    proposer, text = proposer_for(name, kind), golden(name).one
    newest, size = len(text.tokens) - 1, {"eagle1_llama": 128, "eagle3_llama_narrow": 48}.get(name, 64)
    state, row = prefilled(proposer, text), torch.zeros(size)
    call = lambda: proposer.propose(text.tokens[-1], text.hiddens[-1], newest, 3, state, draft_embed_target=row)  # noqa: E731
    if name == "medusa1":
        with pytest.raises(RuntimeUseError, match="this drafter has no embedding"):
            call()
        return
    assert call() == [*text.drafts[:2], DEFERRED]
    assert proposer.read_deferred_draft_token() == text.drafts[2]
    close(row, proposer.runner.weights["embed_tokens"][text.drafts[2]])


@families
def test_layers_may_be_handed_over_as_a_stack(name: str) -> None:
    proposer, text = proposer_for(name), golden(name).one
    layers = proposer.runner.hidden_layers
    stack = text.hiddens[-1].view(layers, -1)
    newest = len(text.tokens) - 1
    state = prefilled(proposer, text)
    assert proposer.propose(text.tokens[-1], None, newest, 2, state, target_hidden_stack=stack) == text.drafts[:2]
    proposer.after_verify(0, state)
    with pytest.raises(RuntimeUseError, match="this drafter takes"):
        proposer.propose(text.tokens[-1], None, newest + 1, 2, state, target_hidden_stack=stack[:, :5].repeat(5, 1))


# -- limits, memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [1, 2, 3, 8, 9])
def test_a_block_ends_at_the_position_limit(left: int) -> None:
    """`left` positions from the newest token on: a block of so many rows, and drafts for all but the first."""
    text = golden("dflash_qwen3").one
    runner = reference("dflash_qwen3", 13 + left)
    proposer = Audited(runner, BlockPool(runner.circuit, blocks=32, block_size=4))
    made = propose(proposer, [text], [prefilled(proposer, text)], 7)[0][0]
    assert len(made) == min(left - 1, 7)
    if left >= 8:
        assert made == text.drafts
    elif left == 1:
        assert proposer.metrics.refusals == {"position_limit": 1}


@pytest.mark.parametrize(("name", "left"), [("dflash_qwen3", 2), ("dflash_qwen3", 3), ("dflash_qwen3", 9), ("eagle1_llama", 3)])
def test_what_the_position_limit_promises_is_enough_on_the_device(name: str, left: int) -> None:
    """The pool is full of promises: every row below the limit is this sequence's, and none beyond it. Block rows and upper
    bounds of what was accepted reach over the limit, and need no memory there."""
    text = golden(name).one
    limit = len(text.tokens) - 1 + left
    runner = reference(name, limit)
    block = next(size for size in (4, 3, 2, 1) if limit % size == 0)
    proposer = Audited(runner, BlockPool(runner.circuit, blocks=limit // block, block_size=block))
    state = proposer.alloc_state_for(10 * limit)
    fed = len(text.tokens) - 1
    proposer.prefill_drafter(text.tokens[:fed], text.hiddens[: fed - 1], state)
    alone = Audited(runner, BlockPool(runner.circuit, blocks=64, block_size=block))
    want = propose(alone, [text], [prefilled(alone, text)], 7)[0][0]
    assert want
    out = torch.zeros(1, 7, dtype=torch.int32)
    token, at = torch.tensor(text.tokens[-1:], dtype=torch.int32), torch.tensor([fed], dtype=torch.int32)
    proposer.propose_batch(token, text.hiddens[fed - 1 : fed], at, 7, [state], out=out)
    assert out[0].tolist() == want + [-1] * (7 - len(want))
    twice = text.hiddens[None, fed - 1 : fed].repeat(1, 2, 1)
    assert proposer.catchup_accepted(torch.stack([token, token], 1), twice, [state], at * 0)
    out.zero_()
    proposer.propose_batch(token, text.hiddens[fed - 1 : fed], at + 1, 7, [state], accepted=at * 0, out=out)
    assert (out[0, 0] >= 0) == (left > (2 if name == "dflash_qwen3" else 1)), "upper bounds do not reach over the limit, either"
    assert not proposer.metrics.refusals


def test_a_smaller_block_drafts_other_tokens() -> None:
    """Case b: rows of a block see each other. So the size is the program's, and not what is asked for."""
    whole, want, text = reference("dflash_qwen3"), fixture_tensors("dflash_qwen3"), golden("dflash_qwen3").one
    facts = tuple((name, 5 if name == "block_size" else value) for name, value in whole.circuit.facts)
    runner = ReferenceRunner(replace(whole.circuit, facts=facts), whole.weights)
    proposer = Audited(runner, BlockPool(runner.circuit, blocks=32, block_size=4))
    drafts, scores = propose(proposer, [text], [prefilled(proposer, text)], 4)
    assert drafts == [want["b.tokens"].tolist()]
    close(scores[0], want["b.logprobs"])
    assert (want["b.logits"] - want["a.logits"][:4]).abs().max() > 1e-2


def test_a_block_has_all_its_rows_or_there_is_none() -> None:
    """12 rows of a prompt, one for the newest hidden, 8 of the block: 21, in six blocks of four."""
    text = golden("dflash_qwen3").one
    for blocks, want in ((6, text.drafts), (5, [])):
        proposer = proposer_for("dflash_qwen3", blocks=blocks)
        state = prefilled(proposer, text)
        assert propose(proposer, [text], [state], 7)[0] == [want]
        assert proposer.pool.held == proposer.pool.blocks_for(proposer.drafter_rows(state)), "scratch is given back"
        assert proposer.metrics.refusals == ({} if want else {"pool_exhausted": 1})


def test_a_budget_holds_a_block_behind_the_last_token() -> None:
    text = golden("dflash_qwen3").one
    proposer = proposer_for("dflash_qwen3", blocks=14, block_size=2)
    state = proposer.alloc_state_for(14)
    assert proposer.pool.ledger.promised == -(-(14 + 7) // 2)
    other = proposer.alloc_state()
    rows = torch.zeros(20, 192)
    assert proposer.prefill_drafter(list(range(21)), rows, other) == 0, "three blocks are left"
    assert proposer.prefill_drafter(list(range(7)), rows[:6], other) == 6
    proposer.prefill_drafter(text.tokens[:13], text.hiddens[:12], state)
    assert propose(proposer, [text], [state], 7)[0] == [text.drafts]


def medusa_of(heads: int) -> ReferenceRunner:
    """The golden drafter's first heads alone, with the same facts, dtypes and states."""
    whole = reference("medusa1")

    def fewer(node: Node) -> Node:
        if node.op not in ("columns", "cat", "heads"):
            return node
        (made,) = node.outputs
        n, columns, *rest = made.type.shape  # type: ignore[union-attr]
        shape = (n, columns * heads // 4, *rest)
        outputs = (replace(made, type=replace(made.type, shape=shape)),)
        attrs = (("count", heads),) if node.op == "heads" else node.attrs
        return replace(node, inputs=node.inputs[:heads], outputs=outputs, attrs=attrs)

    circuit = whole.circuit
    return ReferenceRunner(replace(circuit, nodes=tuple(map(fewer, circuit.nodes))), whole.weights)


def test_another_forward_has_as_many_heads() -> None:
    """States cannot tell them apart, there are none; drafts that no head makes would be -1, which is no token."""
    proposer, text = proposer_for("medusa1"), golden("medusa1").one
    fewer = medusa_of(2)
    assert fewer.kind == Heads(2)
    with pytest.raises(
        RuntimeUseError, match=r"runner's kind: drafts in another way; expected Heads\(heads=4\); got Heads\(heads=2\)"
    ):
        proposer.set_circuit_draft(fewer)
    own = proposer.runner
    for what in ("vocab_size", "hidden_size"):
        other = ReferenceRunner(own.circuit, own.weights)
        other.__dict__[what] = 96
        with pytest.raises(RuntimeUseError, match=f"runner's {what}: drafts in another way"):
            proposer.set_circuit_draft(other)
    assert proposer.runner is own
    proposer.set_circuit_draft(medusa_of(4))
    assert propose(proposer, [text], [prefilled(proposer, text)], 4)[0] == [text.drafts]


@pytest.mark.parametrize("kind", ["reference", "compiled"])
@pytest.mark.parametrize("name", ["medusa1", "dflash_qwen3"])
def test_what_a_call_for_all_drafts_at_once_refuses(name: str, kind: str) -> None:
    runner = RUNNERS[kind](name)
    one, hidden = torch.zeros(1, dtype=torch.int32), torch.zeros(1, runner.hidden_size)
    slots, kv = one[None, :0], {}
    if isinstance(runner.kind, Block):
        pool = BlockPool(runner.circuit, blocks=4, block_size=4)
        kv = {"kv": PagedKV(*pool.storage["kv"], one, one, torch.arange(4, dtype=torch.int32)[None], one, one + 1)}
        slots = torch.arange(1 + runner.kind.gamma, dtype=torch.int32)[:, None]
    for call in (runner.chain, runner.scores):
        for steps in (-1, 0, True, 2.0, "2", None):
            with pytest.raises(RuntimeUseError, match="a chain has at least one step"):
                call(steps, one, hidden, one + 1, kv, slots)
        for odd in (None, "x", 1.5, [[0.0]], hidden[0], hidden[:0], torch.tensor(1.0), hidden.int(), hidden[:, :5]):
            with pytest.raises(RuntimeUseError, match=r"hidden: (does not fit|needs at least one row)"):
                call(2, one, odd, one + 1, kv, slots)
        call(2, one, hidden, one + 1, kv, slots)


def test_heads_take_no_memory_and_nothing_to_keep_up() -> None:
    runner, text = reference("medusa1"), golden("medusa1").one
    proposer = Audited(runner, BlockPool(runner.circuit, memory_bytes=1))
    assert (proposer.pool.total, proposer.prefill_hidden_rows(1000), proposer.needs_comm()) == (0, 1, False)
    state = proposer.alloc_state_for(10**9)
    assert proposer.prefill_drafter(text.tokens[:-1], text.hiddens[:-1], state) == 0
    assert propose(proposer, [text], [state], 4)[0] == [text.drafts]
    with pytest.raises(RuntimeUseError, match="more drafts accepted than there were"):
        proposer.after_verify(5, state)
    with pytest.raises(RuntimeUseError, match="waiting for after_verify"):
        propose(proposer, [text], [state], 4)
    proposer.after_verify(3, state)
    assert proposer.catchup_batch([text.drafts[:3]], [torch.zeros(3, 64)], [15], [state]) == 0
    with pytest.raises(RuntimeUseError, match="do not fit"):
        proposer.catchup_batch([[1]], [torch.zeros(1, 63)], [18], [state])
    assert (proposer.drafter_rows(state), proposer.rows_behind(state, 18), proposer.last_pair_key(state)) == (0, 0, None)
    assert (state.pending_catchup, proposer.take_drafter_kv(state), proposer.metrics.refusals) == (0, None, {})
    assert proposer.metrics.accepted == 3
    proposer.free_state(state)


@families
def test_what_the_forward_is(name: str) -> None:
    proposer, reasons = proposer_for(name), []
    config = {"hidden_size": 128 if name == "eagle1_llama" else 64, "vocab_size": 512}
    binding = proposer.circuit_draft(config, {"trim": "exact", "grammar": True}, reasons=reasons)
    assert binding is not None, reasons
    assert binding.kind == {"medusa1": "heads", "dflash_qwen3": "block"}.get(name, "chain")
    assert binding.drafts == {"medusa1": 4, "dflash_qwen3": 7}.get(name)
    assert binding.hidden_layers == (3 if name in (*EAGLE3_HEADS, "dflash_qwen3") else 1)
    assert proposer.circuit_draft({**config, "hidden_size": 192}) is None
    text = golden(name).one
    state = prefilled(proposer, text)
    proposer.set_circuit_draft(ReferenceRunner(proposer.runner.circuit, proposer.runner.weights))
    assert propose(proposer, [text], [state], 4)[0] == [text.drafts[:4]]


# -- refusals ------------------------------------------------------------------------------------------------------


def test_drafts_of_own_ids_are_not_driven() -> None:
    bound = bind("auto", model=FIXTURES / "eagle3_llama", target_model=target_of("eagle3_llama"), switches={"ids": "own"})
    runner = ReferenceRunner(bound.circuit, bound.load_weights(positions=64))
    with pytest.raises(RuntimeUseError, match=r"drafts ids of its own; expected the target's ids; got its own 192 ids"):
        Audited(runner, BlockPool(runner.circuit, blocks=4))


@pytest.mark.parametrize(
    ("own", "offset", "message"), [(7, 510, "own id 7 with offset 510 is 517"), (3, -4, "own id 3 with offset -4 is -1")]
)
def test_a_map_that_leads_out_of_the_vocabulary_is_refused_at_load(own: int, offset: int, message: str) -> None:
    runner = RUNNERS["compiled"]("eagle3_llama")
    d2t = runner.weights["d2t"].clone()
    d2t[own] = offset
    with pytest.raises(RuntimeUseError, match=f"d2t: leads out of the target's vocabulary; expected ids 0..511; got {message}"):
        load(
            artifact("eagle3_llama"),
            model=FIXTURES / "eagle3_llama",
            target_model=target_of("eagle3_llama"),
            weights={"d2t": d2t},
        )


def test_scores_of_own_ids_are_picked_in_the_targets() -> None:
    """A block drafter with a restricted head: masks and drafts are in the target's ids."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(512, generator=generator)[:40].sort().values
    scores = torch.randn(3, 40, generator=generator)
    wide = torch.full((3, 512), -float("inf"))
    wide[:, ids] = scores
    allowed = torch.stack([words_of({int(token) for token in ids[row::3]} | {row}, 512) for row in range(3)])
    drafts, logprobs = own_ids.best_allowed(scores, allowed, ids - torch.arange(40))
    want = own_ids.best_allowed(wide, allowed, None)
    assert torch.equal(drafts, want[0])
    torch.testing.assert_close(logprobs, want[1])


@pytest.mark.parametrize(("source", "named", "layers", "want"), [
    ("eagle3_llama", "", 32, (1, 15, 28)),  # inputs of 2, 16 and 29
    ("eagle3_llama", "2 18 33", 36, (1, 17, 32)),
    ("eagle3_llama", "1 17 32", 36, (1, 17, 32)),
    ("eagle3_llama", "24 30 36", 36, (23, 29, 35)),
    ("dflash_qwen3", "1 9 17", 36, (1, 9, 17)),
])  # fmt: skip
def test_which_layers_are_captured(source: str, named: str, layers: int, want: tuple[int, ...]) -> None:
    runner = runner_with(source, hidden_layers=named)
    assert runner.hidden_layer_ids(layers) == want
    with pytest.raises(RuntimeUseError, match="does not fit the target"):
        runner.hidden_layer_ids(2)


def test_a_head_as_wide_as_three_of_its_targets_hiddens() -> None:
    """Which entry a row takes is no matter of its width: the first step projects, later ones do not."""
    sizes = {"hidden_size": 192, "target_hidden_size": 64, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 16}
    few = {"intermediate_size": 96, "vocab_size": 96, "draft_vocab_size": 96}
    config = {**default_config("eagle3_llama"), **sizes, **few}
    circuit = load_circuit("eagle3", config=config, act="f32", wt="f32", kv="f32")
    generator = torch.Generator().manual_seed(5)
    weights = {
        weight.name: torch.randn(tuple(map(int, weight.type.shape)), generator=generator) / int(weight.type.shape[-1]) ** 0.5
        for weight in circuit.weights
    }
    tables = {f"rope.{name}": torch.randn(64, 8, generator=generator) for name in ("cos", "sin")}
    runner = ReferenceRunner(circuit, weights | tables)
    assert (runner.hidden_size, runner.recycled_size, runner.embed_size, runner.hidden_layers) == (192, 192, 192, 3)
    proposer = Audited(runner, BlockPool(circuit, blocks=32, block_size=4))
    tokens, hiddens = list(range(7, 13)), torch.randn(5, 192, generator=generator)
    state = proposer.alloc_state()
    proposer.prefill_drafter(tokens[:5], hiddens[:4], state, first_pos=0)
    drafts = proposer.propose(tokens[-1], hiddens[-1], 5, 4, state)
    oracle = dense_of(runner, "exact")
    oracle.append(1, tokens[1:5], hiddens[:4])
    oracle.follow(tokens[-1], hiddens[-1], 5, drafts)
    proposer.free_state(state)


def test_a_head_that_owns_its_embedding_loads_without_a_target() -> None:
    name = "eagle3_llama_narrow"
    runner = load(artifact(name), model=FIXTURES / name, max_position=64, threads=1)
    text = golden(name).one
    proposer = Audited(runner, BlockPool(runner.circuit, blocks=32, block_size=4))
    assert propose(proposer, [text], [prefilled(proposer, text)], 4)[0] == [text.drafts]


def runner_with(name: str, **facts) -> ReferenceRunner:
    made = reference(name)
    changed = tuple((fact, facts.get(fact, value)) for fact, value in made.circuit.facts)
    return ReferenceRunner(replace(made.circuit, facts=changed), made.weights)


@pytest.mark.parametrize("facts", [{"block_size": 1}, {"mask_token": "x"}])
def test_a_block_without_sizes_is_refused(facts: dict) -> None:
    runner = runner_with("dflash_qwen3", **facts)
    with pytest.raises(RuntimeUseError, match="does not say how a block is made"):
        Audited(runner, BlockPool(runner.circuit, blocks=4))
