"""The lm_head with its arg-max: logits = x[n, K] @ W[V, K]^T are reduced where they arise and never stored."""

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from . import vector as v
from .linear import Activations, DotBlock, as_weight, for_rows
from .sizes import lone_tile, rows_on_stack, top1_tasks

_NO_TOKEN = 0x7FFFFFFF


@dataclass(frozen=True)
class Top1Scratch:
    """Workspace of `emit_linear_top1`: one partial result per (task, row)."""

    best: object  # float32 [tasks, n]
    index: object  # int32 [tasks, n]
    total: object  # float32 [tasks, n]: sum of exp(logit - best)


def emit_linear_top1(
    x, weight, token, logprob, scratch, *, n, lanes, allowed=None, bias=None, task_columns=512, block=32, packed=None
):
    """token[i] = the lowest id among the largest logits of row i; logprob[i] = its log-softmax.

    x: [n, K]; weight: [V, K], a buffer or a `packed.Weight`; token: int32 [n]; logprob: float32 [n]; scratch: a Top1Scratch for
    `top1_tasks(V, task_columns)` tasks. allowed: int32 [n, ceil(V / 32)], bit c % 32 of word c / 32 says whether
    column c may be drafted; forbidden columns count for neither result. bias: [V]. NaN logits count as forbidden.
    A row in which nothing is allowed gives token 0 and logprob -inf. `block` divides `task_columns`; both are
    multiples of 32. packed: the scratch of `linear.Activations`.
    """
    assert task_columns % block == 0, f"block {block} does not divide task_columns {task_columns}"
    assert block % 32 == 0, f"block {block} is no multiple of 32"
    weight = as_weight(weight, lanes)
    vocabulary = weight.rows
    tile = lone_tile(n, lanes, weight.columns)
    activations = Activations(x, n=n, lanes=lanes, rows=tile.rows, scratch=packed)
    bias = None if bias is None else v.bits_of(bias)
    tasks = top1_tasks(vocabulary, task_columns)

    width_of_blocks = min(block, vocabulary)
    # A logit and its partial sums per column, and the state.
    together = rows_on_stack(n, width_of_blocks * (lanes + 1) * 4 + 12, activations.rows)

    with T.parallel(0, tasks) as task:
        partial = v.local_array((1, together, width_of_blocks), v.vector_type("float32", lanes))
        logits = v.local_array((together, width_of_blocks), "float32")
        state = _RowStates(together)

        def emit_block(first, width, first_row, count):
            dots = DotBlock(activations, [weight], width, tile, partial)
            dots.emit(first, first_row, count)
            with T.serial(0, count) as row:

                def finish(column, group):
                    (value,) = dots.take(row, column, group)
                    if bias is not None:
                        value = value + v.load(bias, [first + column], group)
                    value = T.bind(value)
                    forbidden = v.splat(v.NEGATIVE_INFINITY, group)
                    value = T.Select(v.is_nan(value, group), forbidden, value)
                    if allowed is not None:
                        keep = _allowed_bits(allowed, first_row + row, first, column, group)
                        value = T.Select(keep, value, forbidden)
                    v.store(logits, [row, column], value, group)

                v.for_columns(width, lanes, finish)
                state.absorb(logits, row, first, width, lanes)

        def emit_some(first_row, count):
            state.reset()
            whole = vocabulary // block
            first_block = task * (task_columns // block)
            if whole:
                with T.serial(0, task_columns // block) as i, T.If(first_block + i < whole), T.Then():
                    emit_block((first_block + i) * block, block, first_row, count)
            if vocabulary % block:
                with T.If(task == tasks - 1), T.Then():
                    emit_block(whole * block, vocabulary % block, first_row, count)

            with T.serial(0, count) as row:
                for source, target in state.pairs(scratch):
                    T.buffer_store(target, T.BufferLoad(source, [row]), [task, first_row + row])

        for_rows(n, together, emit_some)

    with T.serial(0, n) as row:
        final = _RowStates(1)
        final.reset()
        with T.serial(0, tasks) as task:
            best, index, total = (T.bind(T.BufferLoad(part, [task, row])) for _, part in final.pairs(scratch))
            final.merge(0, best, index, lambda _: total)
        best, index, total = (T.BufferLoad(part, [0]) for part in (final.best, final.index, final.total))
        nothing = T.EQ(index, T.int32(_NO_TOKEN))
        T.buffer_store(token, T.Select(nothing, T.int32(0), index), [row])
        # The best logit's own term is exp(0), so log-softmax of it is -log(total).
        value = T.Select(nothing, T.float32(v.NEGATIVE_INFINITY), T.float32(0) - T.log(total))
        v.store(logprob, [row], value)


def _allowed_bits(allowed, row, first, column, group):
    """Lanes of bool for columns first+column..+group; `first` is a multiple of 32 and `group` divides 32."""
    word = T.BufferLoad(allowed, [row, T.floordiv(first, 32) + T.floordiv(column, 32)])
    shift = v.iota(T.floormod(column, 32), group)
    bit = (v.splat(word, group) >> shift) & v.splat(1, group, "int32")
    return T.NE(bit, v.splat(0, group, "int32"))


class _RowStates:
    """Running (largest logit, its id, sum of exp(logit - largest)) of some rows, on the stack of a task."""

    def __init__(self, rows):
        self.rows = rows
        self.best = v.local_array((rows,), "float32")
        self.index = v.local_array((rows,), "int32")
        self.total = v.local_array((rows,), "float32")

    def pairs(self, scratch):
        return ((self.best, scratch.best), (self.index, scratch.index), (self.total, scratch.total))

    def reset(self):
        with T.serial(0, self.rows) as row:
            T.buffer_store(self.best, T.float32(v.NEGATIVE_INFINITY), [row])
            T.buffer_store(self.index, T.int32(_NO_TOKEN), [row])
            T.buffer_store(self.total, T.float32(0), [row])

    def merge(self, row, best, index, total):
        """Take in another state; ids arrive in rising order, so only a larger logit displaces the id.

        `total(reference)` is the other sum of exp, relative to its own `best`, or to `reference` if it can choose.
        """
        with T.If(best > T.BufferLoad(self.best, [row])):
            with T.Then():
                shrink = v.exp(T.BufferLoad(self.best, [row]) - best)
                T.buffer_store(self.total, T.BufferLoad(self.total, [row]) * shrink + total(best), [row])
                T.buffer_store(self.best, best, [row])
                T.buffer_store(self.index, index, [row])
            # Both at -inf: nothing to add, and their difference would be NaN.
            with T.Else(), T.If(best > T.float32(v.NEGATIVE_INFINITY)), T.Then():
                shrink = v.exp(best - T.BufferLoad(self.best, [row]))
                T.buffer_store(self.total, T.BufferLoad(self.total, [row]) + total(best) * shrink, [row])

    def absorb(self, logits, row, first, width, lanes):
        """Take in logits[row, :width], the columns first..first+width-1."""
        largest = v.registers(1, "float32")
        T.buffer_store(largest, T.float32(v.NEGATIVE_INFINITY), [0])

        def take_max(column, group):
            folded = v.lane_fold(v.load(logits, [row, column], group), T.max)
            T.buffer_store(largest, T.max(T.BufferLoad(largest, [0]), folded), [0])

        v.for_columns(width, lanes, take_max)
        best = T.bind(T.BufferLoad(largest, [0]))
        lowest = v.registers(1, "int32")
        T.buffer_store(lowest, T.int32(_NO_TOKEN), [0])
        with T.If(best > T.BufferLoad(self.best, [row])), T.Then():

            def take_index(column, group):
                hit = T.EQ(v.load(logits, [row, column], group), v.splat(best, group))
                ids = T.Select(hit, v.iota(first + column, group), v.splat(_NO_TOKEN, group, "int32"))
                T.buffer_store(lowest, T.min(T.BufferLoad(lowest, [0]), v.lane_fold(ids, T.min)), [0])

            v.for_columns(width, lanes, take_index)

        def total(reference):
            parts = v.registers(1, "float32")
            T.buffer_store(parts, T.float32(0), [0])

            def add(column, group):
                shifted = v.load(logits, [row, column], group) - v.splat(reference, group)
                T.buffer_store(parts, T.BufferLoad(parts, [0]) + v.lane_sum(v.exp(shifted, group)), [0])

            v.for_columns(width, lanes, add)
            return T.BufferLoad(parts, [0])

        self.merge(row, best, T.BufferLoad(lowest, [0]), total)
