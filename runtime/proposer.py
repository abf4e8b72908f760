"""`DraftProposer`: the lifecycle of drafting inside a server, and what every implementation promises.

Words. The target's hidden after token t_p is h_p, and it chose t_(p+1). A drafter row pairs (h_p, t_(p+1)); its *pair
key* is p, and it drafts t_(p+2). A state's *rows* are compact: row index, position and pair key are three numbers.

Promises. Everything is checked before anything changes: a call that raises has changed nothing. A pool that ran out or a
position limit never raises: the sequence gets no drafts, and `metrics.refusals` counts why. Sequences never share a row.
Same inputs give the same drafts, whatever else is in the batch of one width. Calls are serialised by a lock; one that begins
inside of another (a matcher that calls back) is refused.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .metrics import Metrics
from .state import ProposerState

if TYPE_CHECKING:
    from .carried import CarriedKV
    from .draft_binding import DraftBinding
    from .grammar import Grammar
    from .runner import DraftRunner

Hiddens = torch.Tensor | Sequence[torch.Tensor]
"""Target hiddens, one row each: a tensor [n, H] of any strides, or n tensors [H]; any float dtype."""


class DraftProposer(abc.ABC):
    """Drafts for many sequences.

    All methods raise RuntimeUseError, with nothing changed, for a state of another proposer or a freed one, tokens
    outside the vocabulary, hiddens of another shape, lists of unequal length, and positions out of order.
    """

    metrics: Metrics

    # -- lives -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def alloc_state(self) -> ProposerState:
        """A new sequence of unknown length: it grows as far as unpromised memory allows."""

    @abc.abstractmethod
    def alloc_state_for(self, budget_tokens: int | None) -> ProposerState:
        """A new sequence of at most `budget_tokens` (prompt + new tokens), whose memory is promised now and taken lazily.

        Raises:
            PoolExhausted: the memory cannot be promised; admit the sequence later.
        """

    @abc.abstractmethod
    def free_state(self, state: ProposerState) -> None:
        """Give everything back. Freeing twice does nothing.

        A state that is dropped without this keeps its memory until its proposer is gone and another takes over the pool.
        """

    # -- carrying KV over a turn -------------------------------------------------------------------------------

    @abc.abstractmethod
    def take_drafter_kv(self, state: ProposerState) -> CarriedKV | None:
        """Move the KV out of a state, for a later turn of the conversation; the state is then as freshly allocated.

        Its promise shrinks by the blocks that left. None when there is nothing to carry.
        """

    @abc.abstractmethod
    def install_drafter_kv(self, state: ProposerState, carried: CarriedKV, *, prefix: Sequence[int] | None = None) -> bool:
        """Inverse of `take_drafter_kv`, into an empty state.

        Args:
            prefix: the tokens of the new turn. Rows beyond what they have in common with the tokens behind the KV are
                given back: their hiddens saw another text. None: the caller vouches for all rows.

        Returns:
            False, with nothing changed and `carried` still the caller's, where it cannot go: a state that has rows, KV of
            another proposer, of other weights or tokens than it says, one that went back before, or no common row.
        """

    @abc.abstractmethod
    def free_drafter_kv(self, carried: CarriedKV) -> None:
        """Give carried KV back to the pool. Raises RuntimeUseError when it went back before."""

    # -- context -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def prefill_drafter(self, prompt_tokens: Sequence[int], hiddens: Hiddens, state: ProposerState, *, first_pos: int = 0) -> int:
        """Write the rows of a prompt, or of one chunk of it: row i pairs (hidden i, token i + 1).

        Args:
            prompt_tokens: P tokens.
            hiddens: of the tokens 0..P-1, or 0..P-2: the last one's next token is not known here. A server that prefills
                in chunks passes tokens[a : b + 1] with hiddens[a:b], so that no pair is lost between chunks.
            first_pos: sequence position of prompt_tokens[0]; earlier ones (a cached prefix) have no rows.

        Returns:
            Rows written: P - 1, or 0 when the pool is exhausted.
        """

    @abc.abstractmethod
    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """How many hidden rows the proposer can use of a sequence that long: the size of a server's capture buffer."""

    @abc.abstractmethod
    def prefill_uses_shared_buffers(self) -> bool:
        """Whether a prefill uses the target's scratch memory, so that it must not run while the target does."""

    @abc.abstractmethod
    def needs_comm(self) -> bool:
        """Whether the drafter's forward is sharded over ranks, so that it needs the communicator."""

    @abc.abstractmethod
    def block_gamma(self) -> int | None:
        """The block size that a block drafter was trained with (it drafts one less); None for other drafters."""

    @abc.abstractmethod
    def catchup_drafter(self, tokens: Sequence[int], hiddens: Hiddens, row_base: int, pos_base: int, state: ProposerState) -> int:
        """Append rows at `row_base`: row i pairs (hiddens[i], tokens[i]), tokens[0] being at sequence position `pos_base`.

        Returns:
            Rows written; 0, with nothing written, unless row_base == drafter_rows(state), or when the pool is exhausted.
        """

    @abc.abstractmethod
    def catchup_batch(
        self,
        tokens: Sequence[Sequence[int]],
        hiddens: Sequence[Hiddens],
        first_pos: Sequence[int],
        states: Sequence[ProposerState],
    ) -> int:
        """`catchup_drafter` at the end of many sequences in one go, all or nothing: the accepted drafts of the last verify.

        tokens[i][j] is at sequence position first_pos[i] + j; hiddens[i][j] is the target's hidden of the token before it.

        Returns:
            Rows written over all sequences; 0 when the pool is exhausted.
        """

    @abc.abstractmethod
    def catchup_accepted(
        self,
        tokens: torch.Tensor,
        hiddens: torch.Tensor,
        states: Sequence[ProposerState],
        accepted: torch.Tensor,
        *,
        first: int = 1,
    ) -> bool:
        """The device form of `catchup_batch`, after a propose and its verify: writes the rows that the verify left missing.

        Args:
            tokens: int32[n, m] on the device: the drafts as verified. With first=0, the newest token before them, too, which
                trim="seed" rebuilds.
            hiddens: float[n, m, H]: the target's of the token before each.
            accepted: int32[n] on the device. It counts for the trimming, too: there is no `after_verify`.

        Returns:
            False, with nothing changed, when the pool is exhausted.
        """

    # -- drafting ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def propose(
        self,
        last_token: int,
        target_hidden: torch.Tensor | None,
        position: int,
        num_drafts: int,
        state: ProposerState,
        *,
        grammar: Grammar | None = None,
        stop_confidence: float | None = None,
        stop_ids: Collection[int] = (),
        draft_embed_target: torch.Tensor | None = None,
        target_hidden_stack: torch.Tensor | None = None,
    ) -> list[int]:
        """Up to `num_drafts` drafts that follow `last_token`.

        Args:
            last_token: the newest token, chosen by the target and not fed to it yet.
            target_hidden: [H], the target's hidden that chose it.
            position: sequence position of last_token; its row's pair key is position - 1.
            grammar: only tokens that it allows are drafted (see `grammar`). A matcher stands after last_token, and is there
                again afterwards; a fixed mask holds for every draft position. Where nothing is allowed the chain ends.
            stop_confidence: a draft whose probability is below it ends the chain, and is kept.
            stop_ids: a draft among them ends the chain, and is kept.
            draft_embed_target: a row [H] on the device that receives the last draft's embedding. That draft's id is not read:
                `state.DEFERRED` stands for it in the result until `read_deferred_draft_token`. Not with a grammar.
            target_hidden_stack: [layers, H], in place of target_hidden (None then), for drafters that read several layers.

        Returns:
            The drafts; fewer near the position limit or where memory has room for fewer, [] when the sequence can't draft
            now. `after_verify` must follow before the next propose.
        """

    @abc.abstractmethod
    def propose_batch(
        self,
        last_tokens: Sequence[int],
        target_hiddens: Hiddens,
        positions: Sequence[int],
        num_drafts: int,
        states: Sequence[ProposerState],
        *,
        grammars: Sequence[Grammar | None] | None = None,
        stop_ids: Collection[int] = (),
        out_confidence: list[list[float]] | None = None,
        accepted: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> list[list[int]] | torch.Tensor | None:
        """`propose` for n sequences; each weight is read once per draft position.

        The **device form**, with `out`: last_tokens are int32[n] on the device, positions too (or a list), and nothing waits
        for the device. The host counts with upper bounds until `settle`; near the end of memory that may cost drafts.
        Positions on the device are not looked at: they must be the ones that follow.

        Args:
            grammars: one a sequence, or None for those without.
            out: int32[n, num_drafts] on the device, which receives the drafts, -1 where a sequence has none; it is returned.
            accepted: int32[n] on the device: of each sequence's last propose, unless `catchup_accepted` was told. A
                sequence without such a propose ignores its number.
            out_confidence: receives, per sequence, the log-probability of each draft.

        Returns:
            One list per sequence, [] for one that can't draft now; None where this configuration cannot serve n
            sequences at once (nothing has changed: propose one by one). n == 0 gives [] and runs nothing.
        """

    @abc.abstractmethod
    def settle(self, states: Sequence[ProposerState], accepted: Sequence[int]) -> None:
        """Tell the host what the device knew: the accepted drafts of each sequence's oldest device-form propose.

        It may come late, after further proposes; each call accounts for one propose of each sequence, in their order. A
        count that the position of the next propose contradicts is refused; one that leaves a gap before it is counted in
        `metrics.skipped_rows`.
        """

    @abc.abstractmethod
    def read_deferred_draft_token(self) -> int:
        """The id of the draft that the last `propose` with `draft_embed_target` left on the device.

        Raises:
            RuntimeUseError: no draft was left there.
        """

    @abc.abstractmethod
    def propose_batch_max(self) -> int:
        """The most sequences that one drafter forward serves; more are served in parts."""

    @abc.abstractmethod
    def after_verify(self, num_accepted: int, state: ProposerState) -> None:
        """Tell how many of the last propose's drafts the target accepted (0..their number); trims the rows."""

    # -- what a server may ask ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def drafter_rows(self, state: ProposerState) -> int:
        """Rows held. Fewer than expected: hiddens were not handed over, and drafts are worse for it."""

    @abc.abstractmethod
    def rows_behind(self, state: ProposerState, position: int) -> int:
        """Rows missing before the one of the token at `position`, which is proposed or handed over next.

        A step that gave no drafts (paused, none asked for, no room) writes no row for its newest token: hand that one
        over with `catchup_batch`. A cached prefix that never had rows counts until the first row is there.
        """

    @abc.abstractmethod
    def last_pair_key(self, state: ProposerState) -> int | None:
        """Pair key of the newest row, None without rows."""

    @abc.abstractmethod
    def last_confidence(self, state: ProposerState) -> float | None:
        """Smallest top-1 probability among the last propose's drafts, None when there were none."""

    # -- the forward as a circuit ------------------------------------------------------------------------------

    @abc.abstractmethod
    def circuit_draft(
        self, config: Any, levers: Mapping[str, Any] | None = None, *, reasons: list[str] | None = None
    ) -> DraftBinding | None:
        """What this proposer's forward is, as a circuit.

        Args:
            config: the model's, a mapping or an object with attributes.
            levers: what the server turned on, by name (`draft_binding` knows which); unknown ones are not modelled.
            reasons: receives why the result is None.

        Returns:
            None when the circuit is not that forward.
        """

    @abc.abstractmethod
    def set_circuit_draft(self, runner: DraftRunner | None) -> None:
        """Run `runner` (the reference interpreter, say) in place of the own forward from the next call on; None: the own again.

        Raises:
            RuntimeUseError: a runner of another circuit, KV geometry or device.
        """
