"""How values are spelled on the command line."""

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from circuitgraph.cli.common import MAX_WIDTH, parse_formats, parse_switches, parse_widths

WIDTH = st.integers(1, MAX_WIDTH)


@given(st.lists(WIDTH, min_size=1, max_size=8))
def test_listed_widths_come_back_sorted_and_once(widths):
    assert parse_widths(",".join(map(str, widths))) == tuple(sorted(set(widths)))


@given(st.lists(st.tuples(WIDTH, st.integers(0, 9)), min_size=1, max_size=5))
def test_ranges_mean_every_width_between(ranges):
    ranges = [(first, min(first + more, MAX_WIDTH)) for first, more in ranges]
    wanted = {width for first, last in ranges for width in range(first, last + 1)}
    assert parse_widths(" , ".join(f"{first}-{last}" for first, last in ranges)) == tuple(sorted(wanted))


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_refused_as_misuse(text):
    try:
        widths = parse_widths(text)
    except typer.BadParameter:
        return
    assert widths
    assert all(1 <= width <= MAX_WIDTH for width in widths)


@pytest.mark.parametrize("text", ["", "0", "1-", "-3", "4-1", "1,,2", "a", "1.5", "1-2-3", str(MAX_WIDTH + 1), "²"])
def test_refused_widths(text):
    with pytest.raises(typer.BadParameter):
        parse_widths(text)


def test_switches():
    assert parse_switches(["concat=hidden_first", "qk_norm = true", "fc_bias=false"]) == {
        "concat": "hidden_first",
        "qk_norm": True,
        "fc_bias": False,
    }


@pytest.mark.parametrize("items", [["concat"], ["=x"], ["concat="], ["a=1", "a=2"]])
def test_refused_switches(items):
    with pytest.raises(typer.BadParameter):
        parse_switches(items)


def test_formats():
    assert parse_formats(["lm_head=fp8", "layer.* = nvfp4"]) == {"lm_head": "fp8", "layer.*": "nvfp4"}


@pytest.mark.parametrize("items", [["lm_head"], ["=fp8"], ["lm_head="], ["a=fp8", "a=int8"]])
def test_refused_formats(items):
    with pytest.raises(typer.BadParameter):
        parse_formats(items)


def test_the_most_rows_are_the_compilers():
    from circuitgraph.cli.common import MAX_WIDTH
    from circuitgraph.pipeline import MAX_ROWS

    assert MAX_WIDTH == MAX_ROWS
