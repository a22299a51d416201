"""Every form of SIDs gives the same codes; every fault has its name."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grinf.errors import UsageError
from grinf.jobs.sid_columns import Fault, SidReader

SIDS = [[12, 7, 99], [0, 0, 0], [8191, 1, 5]]
LISTS = [pa.list_(pa.int64()), pa.large_list(pa.int16()), pa.list_(pa.uint64()), pa.list_(pa.int32(), 3)]


def read(*columns, sid_format="auto"):
    return SidReader(sid_format).read(columns, ["sid", "b", "c"])


def list_views(kind):
    values = pa.array([8191, 1, 5, 12, 7, 99, 0, 0, 0], pa.int64())
    return kind.from_arrays([3, 6, 0], [3, 3, 3], values)


FORMS = {
    **{str(kind): pa.array(SIDS, kind) for kind in LISTS},
    "list_view": list_views(pa.ListViewArray),
    "large_list_view": list_views(pa.LargeListViewArray),
    "tokens in a list": pa.array([[f"<{x}_{c}>" for x, c in zip("abc", sid, strict=True)] for sid in SIDS]),
    "texts of numbers in a large list": pa.array(
        [[str(c) for c in sid] for sid in SIDS], pa.large_list(pa.large_string())
    ),
    "dictionary of tokens in a list": pa.ListArray.from_arrays(
        [0, 3, 6, 9],
        pa.array(
            [f"<s_{x}_{c}>" for sid in SIDS for x, c in zip("abc", sid, strict=True)]
        ).dictionary_encode(),
    ),
    **{
        form: pa.array([form.format(*sid) for sid in SIDS])
        for form in (
            "<a_{}><b_{}><c_{}>",
            "<a_{}> <b_{}> <c_{}>",
            "<s_a_{}><s_b_{}><s_c_{}>",
            "<|a_{}|><|b_{}|><|c_{}|>",
            "<sid_0_{}><sid_1_{}><sid_2_{}>",
            "<sid_1_{}><sid_2_{}><sid_3_{}>",
            "a{}b{}c{}",
            "C{}C{}C{}",
            "{}-{}-{}",
            "{},{},{}",
            "[{}, {}, {}]",
            "({}_{}_{})",
            "{} {} {}",
            "0{}-00{}-{}",
        )
    },
    "large_string": pa.array(["-".join(map(str, sid)) for sid in SIDS], pa.large_string()),
    "string_view": pa.array(["-".join(map(str, sid)) for sid in SIDS]).cast(pa.string_view()),
    "dictionary": pa.array(["-".join(map(str, sid)) for sid in SIDS]).dictionary_encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_codes(form):
    sids = read(FORMS[form])
    assert sids.codes.tolist() == SIDS
    assert sids.fault.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.uint64(), pa.string()])
def test_one_column_per_level(kind):
    sids = np.array([[1, 2, 3], [0, 5, 6]])
    columns = [pa.array(sids[:, level]).cast(kind) for level in range(3)]
    assert read(*columns).codes.tolist() == sids.tolist()


def test_packed_integers():
    packed = pa.array([340 * 8192**2 + 6566 * 8192 + 5603, None, -1, 8192**3])
    sids = read(packed, sid_format="packed:8192x3")
    assert sids.codes[0].tolist() == [340, 6566, 5603]
    assert sids.fault.tolist() == [0, Fault.NULL_SID, Fault.BAD_CODE, Fault.BAD_CODE]


def test_a_pattern_of_ones_own_with_escapes_and_classes():
    texts = pa.array([r"(7)[x]12", "(7)[x]", "(7)[x]12345678901234567890", None])
    sids = read(texts, sid_format=r"regex:\((\d+)\)[[]x](\d+)")
    assert sids.codes[0].tolist() == [7, 12]
    assert sids.fault.tolist() == [0, Fault.UNREADABLE, Fault.UNREADABLE, Fault.NULL_SID]


def test_a_pattern_reads_lists_of_tokens_as_one_text():
    sids = read(pa.array([["<x1>", "<y2>"]]), sid_format=r"regex:<x(?P<one>\d+)><y(\d+)>")
    assert sids.codes.tolist() == [[1, 2]]


def test_f40_a_null_list_shifts_no_row():
    for kind in (pa.list_(pa.int64()), pa.list_(pa.int64(), 3), pa.large_list(pa.int64())):
        sids = read(pa.array([[1, 2, 3], None, [4, 5, 6]], kind))
        assert sids.codes[[0, 2]].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert sids.fault.tolist() == [0, Fault.NULL_SID, 0]


def test_faults_of_lists():
    rows = [[1, 2], None, [], [1, None], [-1, 2], [2**31, 2], list(range(17)), [3, 4]]
    sids = read(pa.array(rows))
    assert sids.fault.tolist() == [
        0,
        Fault.NULL_SID,
        Fault.NO_CODES,
        Fault.NULL_CODE,
        Fault.BAD_CODE,
        Fault.BAD_CODE,
        Fault.TOO_DEEP,
        0,
    ]
    assert sids.codes[[0, 7], :3].tolist() == [[1, 2, -1], [3, 4, -1]]


def test_faults_of_texts():
    rows = ["3-9-1", "3-9", None, "3-9-1-SKU42", "", "x", "-1-2-3", "3--9", "3-9-1 "]
    sids = read(pa.array(rows))
    bad = Fault.UNREADABLE
    assert sids.fault.tolist() == [0, 0, Fault.NULL_SID, bad, bad, bad, bad, bad, 0]
    assert sids.codes[1].tolist() == [3, 9, -1]


def test_levels_out_of_place_are_no_sid():
    sids = read(pa.array(["<a_1><b_2>", "<b_2><a_1>", "<a_1><c_2>"]))
    assert sids.fault.tolist() == [0, Fault.UNREADABLE, Fault.UNREADABLE]


def test_null_tokens_in_a_list_are_a_fault():
    sids = read(pa.array([["<a_1>", "<b_2>"], ["<a_1>", None], None, []]))
    assert sids.fault.tolist() == [0, Fault.UNREADABLE, Fault.NULL_SID, Fault.UNREADABLE]


def test_nulls_at_the_end_of_level_columns_are_a_short_sid():
    sids = read(pa.array([1, 1, None, None]), pa.array([2, None, 2, None]))
    assert sids.codes[:2].tolist() == [[1, 2], [1, -1]]
    assert sids.fault.tolist() == [0, 0, Fault.NULL_CODE, Fault.NULL_SID]


def test_the_texts_of_a_catalogue_have_one_spelling_in_all_batches():
    reader = SidReader()
    assert reader.read([pa.array([None, None], pa.string())], ["sid"]).fault.tolist() == [Fault.NULL_SID] * 2
    assert reader.read([pa.array(["x"])], ["sid"]).fault.tolist() == [Fault.UNREADABLE]
    assert reader.read([pa.array(["7"])], ["sid"]).codes.tolist() == [[7]]
    assert reader.read([pa.array(["1-2"])], ["sid"]).codes.tolist() == [[1, 2]]
    assert reader.read([pa.array(["1-2-3", "8"])], ["sid"]).codes.tolist() == [[1, 2, 3], [8, -1, -1]]
    with pytest.raises(UsageError, match="two ways: '7' and '1,2'"):
        reader.read([pa.array(["1,2"])], ["sid"])


TEXTS = st.sampled_from(["3-9-1", "4-0", "7", "3,9,1", "<a_3><b_9>", "<0_1><1_2>", "<1_2><2_3>", "junk", ""])


def reading(batches):
    """SIDs of texts, or "refused" where they are spelled in two ways."""
    reader, found = SidReader(), {}
    for batch in batches:
        try:
            sids = reader.read([pa.array(batch)], ["sid"])
        except UsageError:
            return "refused"
        rows = zip(batch, sids.codes.tolist(), sids.fault.tolist(), strict=True)
        found |= {text: None if fault else [code for code in row if code >= 0] for text, row, fault in rows}
    return found


@given(st.lists(TEXTS, min_size=1, max_size=12), st.randoms(use_true_random=False), st.integers(0, 12))
def test_neither_order_nor_batches_decide_what_a_text_means(texts, rng, cut):
    one = reading([texts])
    rng.shuffle(texts)
    assert reading([batch for batch in (texts[:cut], texts[cut:]) if batch]) == one
    spellings = {"-" if "-" in text else "," if "," in text else text[:2] for text in texts if len(text) > 1}
    assert (one == "refused") == (len(spellings - {"ju"}) + ("7" in texts and "<" in "".join(texts)) > 1)


def test_sids_to_look_up_have_no_flag_for_their_format():
    reader = SidReader(is_mixed=True)
    assert reader.read([pa.array(["x", None])], ["sid"]).fault.tolist() == [Fault.UNREADABLE, Fault.NULL_SID]
    with pytest.raises(UsageError, match="holds no SIDs\nwrite 3-9-1"):
        reader.read([pa.array([True])], ["sid"])


def test_sids_to_look_up_may_each_have_a_spelling_of_their_own():
    reader = SidReader(is_mixed=True)
    for _ in range(2):
        sids = reader.read([pa.array(["3-9", "3,9,1", "x", None, "<a_3><b_9>", "7"])], ["sid"])
        assert sids.codes[[0, 1, 4, 5]].tolist() == [[3, 9, -1], [3, 9, 1], [3, 9, -1], [7, -1, -1]]
        assert sids.fault.tolist() == [0, 0, Fault.UNREADABLE, Fault.NULL_SID, 0, 0]


def test_one_column_named_as_the_first_level_is_a_level():
    assert SidReader().read([pa.array([5, 6])], ["sid_0"]).codes.tolist() == [[5], [6]]


@pytest.mark.parametrize(("column", "sid_format"), [(["x", "y"], "auto"), (["1-2"], "tokens")])
def test_texts_that_are_all_unreadable_are_not_blamed_row_by_row(column, sid_format):
    reader = SidReader(sid_format)
    reader.read([pa.array(column)], ["sid"])
    with pytest.raises(UsageError, match=f"its first value is '{column[0]}'.*\n--sid-format is {sid_format}"):
        reader.refuse_unread()


def test_a_column_of_nulls_is_faulty_not_unreadable():
    assert read(pa.nulls(2)).fault.tolist() == [Fault.NULL_SID] * 2


@pytest.mark.parametrize(
    ("column", "sid_format", "said"),
    [
        (pa.array([1, 2]), "auto", "integers of one column"),
        (pa.array([1.5]), "auto", "of type double holds no SIDs\ncast the codes to integers"),
        (pa.array([[1.5]]), "auto", "holds no SIDs"),
        (pa.array(["1-2"]), "nonsense", "is unknown"),
        (pa.array(["1-2"]), "regex:1-2", "has no groups"),
        (pa.array(["1-2"]), "regex:(1", "is no pattern"),
        (pa.array([1]), "packed:8192", "names no packing"),
        (pa.array([1]), "packed:8192x9", "names no packing"),
        (pa.array(["1"]), "packed:8192x3", "holds no SIDs"),
    ],
)
def test_columns_and_formats_that_cannot_be_used(column, sid_format, said):
    with pytest.raises(UsageError, match=said):
        read(column, sid_format=sid_format)
