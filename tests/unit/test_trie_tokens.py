"""(level, code) -> token id."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grinf.config.load import resolve
from grinf.config.settings import BuildTrieSettings
from grinf.errors import TrieFileError, UsageError
from grinf.jobs.build_trie import run_build_trie
from grinf.trie import TokenMapping, trie_of
from grinf.trie import tokens as tokens_module
from grinf.trie.tokens import check_tokenizer, load_tokenizer, tokenizer_digest

TEMPLATE = "<{letter}_{code}>"


def save_tokenizer(folder, tokens):
    """A byte-level tokenizer of single letters, and `tokens` of its own."""
    letters = {letter: index for index, letter in enumerate("<>_abcdefgh0123456789")}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_tokens(tokens)
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    return core.token_to_id


def all_tokens(sizes):
    return [f"<{'abc'[level]}_{code}>" for level, size in enumerate(sizes) for code in range(size)]


def test_f30_ids_are_looked_up_whatever_their_order(tmp_path):
    token_id = save_tokenizer(tmp_path, sorted(all_tokens([12, 12]), reverse=True))
    mapping = TokenMapping.from_tokenizer(tmp_path, TEMPLATE, [12, 12])
    assert mapping.token_ids[1].tolist() == [token_id(f"<b_{code}>") for code in range(12)]
    assert mapping.token_ids[0].dtype == np.int32
    assert mapping.source.tokenizer_digest == tokenizer_digest(tmp_path)


def test_f31_codes_that_split_are_named_with_their_pieces(tmp_path):
    save_tokenizer(tmp_path, all_tokens([12])[:5])
    with pytest.raises(UsageError) as error:
        TokenMapping.from_tokenizer(tmp_path, TEMPLATE, [12])
    assert "7 SID tokens are not one token each" in error.value.what
    assert "'<a_5>' is ['<', 'a', '_', '5', '>']" in error.value.why
    assert error.value.why.endswith("and 2 more")


def test_f31_one_token_inside_another_is_a_split(tmp_path):
    save_tokenizer(tmp_path, [f"a_{code}" for code in range(10)])
    with pytest.raises(UsageError, match=r"'a_12' is \['a_1', '2'\]"):
        TokenMapping.from_tokenizer(tmp_path, "{letter}_{code}", [13])


def test_codes_that_do_not_occur_may_lack_a_token(tmp_path):
    token_id = save_tokenizer(tmp_path, ["<a_1>", "<b_0>", "<end>"])
    used = [np.array([False, True]), np.array([True])]
    mapping = TokenMapping.from_tokenizer(tmp_path, TEMPLATE, [2, 1], "<end>", used)
    assert mapping.token_ids[0].tolist() == [-1, token_id("<a_1>")]
    assert mapping.token_ids[1].tolist() == [token_id("<b_0>"), token_id("<end>")]
    with pytest.raises(UsageError, match="'<a_0>' is"):
        TokenMapping.from_tokenizer(tmp_path, TEMPLATE, [2, 1], "<end>", [used[0] | True, used[1]])


def test_the_unknown_token_is_no_token(tmp_path):
    core = Tokenizer(models.WordLevel({"[UNK]": 0, "<a_0>": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"'<a_1>' is \['\[UNK\]'\]"):
        TokenMapping.from_tokenizer(tmp_path, TEMPLATE, [2])


def test_two_codes_with_one_token_are_refused(tmp_path):
    save_tokenizer(tmp_path, [f"<x_{code}>" for code in range(3)])
    with pytest.raises(UsageError, match="<x_0> and <x_0> have one token id"):
        TokenMapping.from_tokenizer(tmp_path, "<x_{code}>", [3, 3])


def test_offset_codes_of_a_template(tmp_path):
    token_id = save_tokenizer(tmp_path, [f"C{code}" for code in range(5)])
    mapping = TokenMapping.from_tokenizer(tmp_path, "C{offset_code}", [2, 3])
    assert [ids.tolist() for ids in mapping.token_ids] == [
        [token_id("C0"), token_id("C1")],
        [token_id(f"C{code}") for code in (2, 3, 4)],
    ]


@pytest.mark.parametrize("template", ["<{letter}>", "<{code", "<{cod}>", "<{}>", "<{code.x}>", "<{code:zz}>"])
def test_templates_that_spell_no_code_are_refused(tmp_path, template):
    with pytest.raises(UsageError, match="token template"):
        TokenMapping.from_tokenizer(tmp_path, template, [2])


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(TrieFileError, match="no tokenizer in"):
        TokenMapping.from_tokenizer(tmp_path, TEMPLATE, [2])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TrieFileError, match="cannot be read"):
        TokenMapping.from_tokenizer(tmp_path, TEMPLATE, [2])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "null"),
        ("tokenizer_config.json", '{"a"'),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": 5}'),
        ("special_tokens_map.json", "[]"),
        ("added_tokens.json", "[1]"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "\xff"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '"model"'),
    ],
)
def test_a_broken_tokenizer_is_told_by_its_file(tmp_path, name, text):
    save_tokenizer(tmp_path, all_tokens([2]))
    (tmp_path / name).write_bytes(text.encode("latin1"))
    with pytest.raises(TrieFileError, match=rf"{name}.* cannot be read|tokenizer in .* cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("change", [{"type": "Nope"}, {"vocab": {"a": "x"}}, {"merges": 5}, None])
def test_what_the_library_in_rust_refuses_is_told(tmp_path, change):
    save_tokenizer(tmp_path, all_tokens([2]))
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    whole["model"] = None if change is None else whole["model"] | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(TrieFileError, match="cannot be read"):
        load_tokenizer(tmp_path)


def bound(folder, tokens, sizes=(2, 3), end=None):
    """A trie whose tokens were looked up in a new tokenizer of some tokens."""
    save_tokenizer(folder, tokens)
    trie = trie_of(np.array([[0, 1], [1, 2]]), [5, 6], codebook_sizes=sizes, end_token=end)
    return trie.with_tokens(TokenMapping.from_tokenizer(folder, TEMPLATE, sizes, end))


@pytest.mark.parametrize("end", [None, "<end>"])
def test_f59_a_model_must_have_the_tokens_of_the_trie(tmp_path, end):
    tokens = [*all_tokens([2, 3]), "<end>"]
    trie = bound(tmp_path / "one", tokens, end=end)
    assert check_tokenizer(trie, tmp_path / "one")
    save_tokenizer(tmp_path / "more", [*tokens, "<other>"])
    assert tokenizer_digest(tmp_path / "more") != tokenizer_digest(tmp_path / "one")
    assert check_tokenizer(trie, tmp_path / "more")
    (tmp_path / "none").mkdir()
    assert not check_tokenizer(trie, tmp_path / "none")
    swapped = [*tokens[:3], tokens[4], tokens[3], "<end>"]
    token_id = save_tokenizer(tmp_path / "swapped", swapped)
    with pytest.raises(UsageError, match="'<b_1>' is token 24 in the trie") as error:
        check_tokenizer(trie, tmp_path / "swapped")
    assert error.value.why.endswith(f"it is {token_id('<b_1>')}")
    save_tokenizer(tmp_path / "fewer", tokens[:-2])
    with pytest.raises(UsageError, match=r"'<b_2>' is token 25 in the trie\n.*it is no token"):
        check_tokenizer(trie, tmp_path / "fewer")


def test_f59_the_end_of_short_sids_is_compared_too(tmp_path):
    tokens = all_tokens([2, 3])
    trie = bound(tmp_path / "one", [*tokens, "<x>", "<end>"], end="<end>")
    save_tokenizer(tmp_path / "two", [*tokens, "<end>"])
    with pytest.raises(UsageError, match="'<end>' is token 27 in the trie"):
        check_tokenizer(trie, tmp_path / "two")


def test_a_stray_code_is_told_before_every_code_is_spelled(tmp_path, monkeypatch):
    save_tokenizer(tmp_path, all_tokens([3]))
    spelled = []
    spell = tokens_module._spell
    monkeypatch.setattr(tokens_module, "_spell", lambda *given: spelled.append(given) or spell(*given))
    used = np.zeros(1 << 20, bool)
    used[[0, 2, -1]] = True
    with pytest.raises(UsageError, match="1 SID tokens are not one token each"):
        TokenMapping.from_tokenizer(tmp_path, TEMPLATE, [1 << 20], None, [used])
    assert len(spelled) < 10


def test_bases():
    mapping = TokenMapping.from_bases([100, 300], [3, 2], 7)
    assert [ids.tolist() for ids in mapping.token_ids] == [[100, 101, 102], [300, 301, 7]]


@pytest.mark.parametrize(
    ("bases", "end", "said"),
    [
        ([1], None, "does not fit SIDs of 2 levels"),
        ([-1, 10], None, "range of token ids"),
        ([0, 2**31 - 1], None, "range of token ids"),
        ([0, 2], None, "code 2 of level 0 and code 0 of level 1 have one token id, 2"),
        ([0, 10], 1, "code 1 of level 0 and END have one token id, 1"),
    ],
)
def test_bases_that_cannot_be(bases, end, said):
    with pytest.raises(UsageError, match=said):
        TokenMapping.from_bases(bases, [3, 2], end)


def test_a_trie_takes_only_a_mapping_of_its_own_codebooks():
    trie = trie_of(np.array([[0, 1], [2, 0]]), [5, 6])
    assert trie.token_ids is None
    mapping = TokenMapping.from_bases([10, 20], trie.codebook_sizes)
    bound = trie.with_tokens(mapping)
    assert bound.token_ids is not None
    assert bound.token_ids[0].tolist() == [10, 11, 12]
    with pytest.raises(TrieFileError, match="codes per level"):
        trie.with_tokens(TokenMapping.from_bases([10, 20], [3, 3]))


def test_a_build_binds_the_codes_and_notices_another_tokenizer(tmp_path):
    token_id = save_tokenizer(tmp_path / "model", ["<a_1>", "<b_0>", "<b_2>", "<end>"])
    pq.write_table(pa.table({"item_id": [1, 2, 3], "sid": [[1, 0], [1, 2], [1]]}), tmp_path / "items.parquet")
    given = {
        "items": [str(tmp_path / "items.parquet")],
        "output": str(tmp_path / "a.grtrie"),
        "tokenizer": str(tmp_path / "model"),
        "token_template": TEMPLATE,
        "end_token": "<end>",
    }

    def build():
        return run_build_trie(resolve(BuildTrieSettings, given, None), lambda stage, done, total: None)

    trie = build().trie
    assert trie is not None
    assert trie.token_ids is not None
    assert trie.token_ids[0].tolist() == [-1, token_id("<a_1>")]
    assert trie.token_ids[1].tolist() == [token_id("<b_0>"), -1, token_id("<b_2>"), token_id("<end>")]
    assert build().status == "unchanged"
    save_tokenizer(tmp_path / "model", ["<b_0>", "<b_2>", "<a_1>", "<end>"])
    with pytest.raises(UsageError, match="other inputs or settings"):
        build()
    save_tokenizer(tmp_path / "model", ["<b_0>", "<b_2>", "<end>"])
    given["overwrite"] = "true"
    with pytest.raises(UsageError, match="'<a_1>' is"):
        build()
    assert (tmp_path / "a.grtrie").exists()
