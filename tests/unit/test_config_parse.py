"""The spellings of durations, schedules, ranges, counts, sizes and scores, and what each refusal tells."""

import pytest

from grinf.config import parse
from grinf.config.parse import Score, Sla
from grinf.errors import UsageError


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("100ms", 100_000_000),
        ("1.5s", 1_500_000_000),
        (".5us", 500),
        ("1m30s", 90_000_000_000),
        ("1h 2min", 3_720_000_000_000),
        ("5 µs", 5_000),
        ("5μs", 5_000),
        ("0ns", 0),
    ],
)
def test_durations(text, ns):
    assert parse.parse_duration_ns(text) == ns


@pytest.mark.parametrize(
    "text", ["", "ms", "1x", "-5ms", "1m30", "1.5ns", "1e3ms", "١ms", "5ms5", "9" * 99 + "h"]
)
def test_what_is_no_duration(text):
    with pytest.raises(UsageError, match="is not"):
        parse.parse_duration_ns(text)


def test_a_bare_number_is_no_duration_and_the_error_says_how_to_write_it():
    with pytest.raises(UsageError) as caught:
        parse.parse_duration_ns("100")
    assert caught.value.what == "'100' has no unit"
    assert caught.value.fix == "write 100ms or 100s"


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "0s"), (90_000_000_000, "90s"), (3_600_000_000_000, "1h"), (1, "1ns")]
)
def test_durations_are_spelled_in_the_largest_unit_that_divides_them(ns, text):
    assert parse.format_duration(ns) == text


@pytest.mark.parametrize(
    ("text", "sla"),
    [
        ("100ms", Sla("p99", 100_000_000)),
        ("avg:1s", Sla("avg", 1_000_000_000)),
        ("p99.9:2ms", Sla("p99.9", 2_000_000)),
    ],
)
def test_slas(text, sla):
    assert parse.parse_sla(text) == sla


@pytest.mark.parametrize(
    ("text", "told"), [("p98:1s", "'p98'"), ("p99:100", "no unit"), ("0ms", "no time"), (":1s", "''")]
)
def test_what_is_no_sla(text, told):
    with pytest.raises(UsageError, match=told):
        parse.parse_sla(text)


@pytest.mark.parametrize(
    ("text", "beams"),
    [
        ("900", (900,)),
        ("20-300-900", (20, 300, 900)),
        ("20/300/900", (20, 300, 900)),
        ("20->300->900", (20, 300, 900)),
        (" 20 - 300 ", (20, 300)),
    ],
)
def test_beams(text, beams):
    assert parse.parse_beams(text) == beams


@pytest.mark.parametrize("text", ["", "a", "20-300/900", "20,300", "-20", "2.5", "1" * 10, "20--30"])
def test_what_is_no_schedule(text):
    with pytest.raises(UsageError, match="is not a beam schedule"):
        parse.parse_beams(text)


def test_a_width_of_zero_is_refused():
    with pytest.raises(UsageError, match="keep no beam"):
        parse.parse_beams("20-0-900")


@pytest.mark.parametrize("text", ["20-", "900,20-"])
def test_a_shell_redirect_is_explained(text):
    with pytest.raises(UsageError) as caught:
        parse.parse_beams_list(text)
    assert "redirect" in caught.value.why
    assert "20-300-900" in caught.value.fix


def test_a_list_of_schedules_drops_repeats():
    assert parse.parse_beams_list("900,20-300-900,900") == ((900,), (20, 300, 900))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("500", (500,)),
        ("100:300:100", (100, 200, 300)),
        ("100:250:100", (100, 200)),
        ("100,1k,100", (100, 1000)),
        ("10:10:1,7", (10, 7)),
    ],
)
def test_ranges(text, values):
    assert parse.parse_range(text) == values


@pytest.mark.parametrize(
    "text", ["100:200", "1:2:3:4", "300:100:100", "0:5:1", "1:5:0", "1,,2", "1:1M:1", "x", "0100:a:1"]
)
def test_what_is_no_range(text):
    with pytest.raises(UsageError):
        parse.parse_range(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("0100", 100), ("10_000", 10_000), ("10k", 10_000), ("1.5M", 1_500_000), ("2G", 2 * 10**9)],
)
def test_counts(text, count):
    assert parse.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "1.5", "1.0005k", "ten", "-1", "10kk", "1e3", "10:50:10"])
def test_what_is_no_count(text):
    with pytest.raises(UsageError, match="is not"):
        parse.parse_count(text)


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 << 30), ("8GB", 8 * 10**9), ("1.5 KiB", 1536), ("7B", 7)]
)
def test_sizes(text, size):
    assert parse.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["8", "8G", "8gib", "0.3B"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="is not"):
        parse.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "score"), [("vocab", Score("vocab")), ("topk", Score("topk")), ("topk:50", Score("topk", 50))]
)
def test_scores(text, score):
    assert parse.parse_score(text) == score
    assert str(score) == text


@pytest.mark.parametrize(
    ("text", "told"), [("vocabs", "mean 'vocab'"), ("level:3", "no number"), ("topk:0", "no candidate")]
)
def test_what_is_no_score(text, told):
    with pytest.raises(UsageError) as caught:
        parse.parse_score(text)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda", "cuda:0", "cuda:0,cuda:3"])
def test_devices(text):
    assert parse.parse_device(text) == text


@pytest.mark.parametrize(
    ("text", "meant"),
    [("1", "cuda:1"), ("0,1", "cuda:0,cuda:1"), ("0, cuda:3", "cuda:0,cuda:3"), ("cpu,cpu", "cpu,cpu")],
)
def test_several_devices(text, meant):
    assert parse.parse_device(text) == meant


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:0,", "cpu,cuda:0", "0,", "-1"])
def test_what_is_no_device(text):
    with pytest.raises(UsageError, match="is not a device"):
        parse.parse_device(text)


@pytest.mark.parametrize(
    ("text", "value"), [("on", True), ("TRUE", True), ("1", True), ("no", False), ("0", False)]
)
def test_switches(text, value):
    assert parse.parse_bool(text) is value


@pytest.mark.parametrize(
    ("text", "most", "spelled"),
    [
        ("10", 10, "10"),
        ("1k", 1000, "1000"),
        ("5%", 10, "5%"),
        ("0.5 %", 1, "0.5%"),
        ("0", 0, "0"),
        ("0%", 0, "0%"),
    ],
)
def test_quotas(text, most, spelled):
    quota = parse.parse_quota(text)
    assert str(quota) == spelled
    assert not quota.is_exceeded(most, 200)
    assert quota.is_exceeded(most + 1, 200)


@pytest.mark.parametrize("text", ["-1", "-1%", "101%", "%", "", "1.5", "ten", "nan%"])
def test_what_is_no_quota(text):
    with pytest.raises(UsageError):
        parse.parse_quota(text)


def test_switches_take_no_other_word():
    with pytest.raises(UsageError, match="neither true nor false"):
        parse.parse_bool("maybe")


@pytest.mark.parametrize("text", ["nan", "inf", "1_0", "--1", ""])
def test_what_is_no_number(text):
    with pytest.raises(UsageError, match="is not a number"):
        parse.parse_float(text)


def test_named_fields_are_read_each_by_its_own_parser():
    fields = {"base": parse.parse_duration_ns, "max_batch": parse.parse_count}
    assert parse.parse_fields("base=9ms,max_batch=16", fields) == {"base": 9_000_000, "max_batch": 16}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("base", "has no value"),
        ("bse=1ms", "did you mean 'base'?"),
        ("base=9", "no unit"),
        ("base=9ms,base=8ms", "'base' twice"),
    ],
)
def test_what_are_no_named_fields(text, told):
    with pytest.raises(UsageError) as caught:
        parse.parse_fields(text, {"base": parse.parse_duration_ns})
    assert told in str(caught.value)
