"""What is spelled out reads back as the same value, for parsers and for whole settings."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grinf.config import parse
from grinf.config.load import resolve
from grinf.config.settings import BenchSettings, RecallSettings
from grinf.errors import UsageError

WIDTHS = st.lists(st.integers(1, 10**9 - 1), min_size=1, max_size=8).map(tuple)


@given(st.integers(0, 10**18))
def test_a_duration_reads_back(ns):
    assert parse.parse_duration_ns(parse.format_duration(ns)) == ns


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.sampled_from(["h", "m", "s", "ms", "us", "ns"])),
        min_size=1,
        max_size=4,
    )
)
def test_parts_of_a_duration_add_up(parts):
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert parse.parse_duration_ns(text) == sum(
        parse.parse_duration_ns(f"{number}{unit}") for number, unit in parts
    )


@given(WIDTHS, st.sampled_from(["-", "/", "->"]))
def test_a_schedule_reads_back_with_any_separator(beams, separator):
    assert parse.parse_beams(separator.join(map(str, beams))) == beams


@given(st.integers(1, 10**6), st.integers(0, 500), st.integers(1, 10**4))
def test_a_range_includes_both_ends_that_its_step_meets(start, steps, step):
    stop = start + steps * step
    assert parse.parse_range(f"{start}:{stop}:{step}") == tuple(range(start, stop + 1, step))


@given(st.integers(0, 10**12), st.sampled_from([("", 1), ("k", 10**3), ("M", 10**6), ("G", 10**9)]))
def test_a_count_scales_by_its_unit(number, unit):
    assert parse.parse_count(f"{number}{unit[0]}") == number * unit[1]


@given(st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 6)))
def test_a_number_reads_back(number):
    assert math.isclose(parse.parse_float(f"{number:.6f}"), number, abs_tol=1e-9)


@pytest.fixture(scope="module", autouse=True)
def _no_settings_file(tmp_path_factory):
    """Run where there is no grinf.toml."""
    with contextlib.chdir(tmp_path_factory.mktemp("empty")):
        yield


PARSERS = [
    parse.parse_beams_list,
    parse.parse_bool,
    parse.parse_bytes,
    parse.parse_count,
    parse.parse_device,
    parse.parse_duration_ns,
    parse.parse_float,
    parse.parse_ints,
    parse.parse_range,
    parse.parse_score,
    parse.parse_slas,
]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.__name__)
@given(text=st.text("0123456789.,:-+/> _aegkmnsuxBGKMTihp%", max_size=12) | st.text(max_size=12))
def test_any_text_is_read_or_refused_with_what_was_written(parser, text):
    with contextlib.suppress(UsageError):
        assert parser(text) is not None


@given(
    beams=WIDTHS.filter(lambda beams: len(beams) < 5),
    top_k=st.none() | st.integers(1, 10**6),
    score=st.sampled_from(
        [parse.Score("vocab"), parse.Score("topk"), parse.Score("topk", 7), parse.Score("level")]
    ),
    resume=st.booleans(),
    suffix=st.lists(st.sampled_from(["<|sid_begin|>", "<x>"]), max_size=2).map(tuple),
)
def test_recall_settings_read_back(beams, top_k, score, resume, suffix):
    flags = {"model": "m", "trie": "t", "input": ["a", "b,c"], "suffix": suffix}
    settings = resolve(
        RecallSettings, flags | {"beams": beams, "top_k": top_k, "score": score, "resume": resume}
    )
    assert resolve(RecallSettings, settings.spelled()).model_dump() == settings.model_dump()


@given(
    beams=st.lists(WIDTHS, min_size=1, max_size=3, unique=True).map(tuple),
    input_len=st.lists(st.integers(1, 10**6), min_size=1, max_size=5, unique=True).map(tuple),
    limits=st.lists(st.integers(1, 10**12), min_size=1, max_size=2),
    budget=st.none() | st.integers(1, 10**15).map(parse.format_duration),
)
def test_bench_settings_read_back(beams, input_len, limits, budget):
    sla = tuple(parse.Sla("p99.9", limit) for limit in limits)
    settings = resolve(BenchSettings, {"beams": beams, "input_len": input_len, "sla": sla, "budget": budget})
    assert resolve(BenchSettings, settings.spelled()).model_dump() == settings.model_dump()
