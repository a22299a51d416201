"""(level, code) -> token id: looked up in the tokenizer, or computed from one base per level."""

import json
import os
import string
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from grinf.errors import TrieFileError, UsageError
from grinf.trie.manifest import EndCodes, TokenSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grinf.trie.csr import Trie

SHOWN = 5
CHUNK = 1 << 14
"""Codes that are looked up together."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True, eq=False)
class TokenMapping:
    """Token ids of every code.

    Attributes:
        token_ids: Per level int32 [K_l], or [K_l + 1] where short SIDs end (END last); -1: no token.
        source: Where they came from.
    """

    token_ids: tuple[np.ndarray, ...]
    source: TokenSource

    @classmethod
    def from_tokenizer(
        cls,
        folder: Path,
        template: str,
        codebook_sizes: Sequence[int],
        end_token: str | None = None,
        used: Sequence[np.ndarray] | None = None,
    ) -> "TokenMapping":
        """Look every code up in a tokenizer; order and gaps of its vocabulary do not matter.

        Args:
            folder: Checkpoint or tokenizer folder.
            template: Text of a code's token, see `check_template`.
            codebook_sizes: Codes per level.
            end_token: Text of the token that ends a short SID.
            used: Per level bool [K_l], codes that occur: others may lack a token. None: every code needs one.

        Raises:
            UsageError: A template that cannot be used, or codes that are not one token each, all distinct.
            TrieFileError: The folder holds no readable tokenizer.
        """
        check_template(template)
        codes = _Codes(tuple(codebook_sizes), template, end_token)
        needed = np.ones(codes.total, bool)
        if used:
            needed[: sum(codebook_sizes)] = np.concatenate(used)
        tokenizer, ids = load_tokenizer(folder), np.full(codes.total, -1, np.int32)
        ids[needed] = codes.look_up(tokenizer, np.flatnonzero(needed))
        if split := np.flatnonzero(needed & (ids < 0)).tolist():
            texts = [codes.text(index) for index in split[:SHOWN]]
            pieces = [tokenizer.tokenize(text, add_special_tokens=False) for text in texts]
            told = [f"{text!r} is {tokens}" for text, tokens in zip(texts, pieces, strict=True)]
            more = f"; and {len(split) - SHOWN:,} more" if len(split) > SHOWN else ""
            raise UsageError(
                f"{len(split):,} SID tokens are not one token each in {folder}",
                "; ".join(told) + more,
                f"add them to the tokenizer as tokens of their own, or correct the template {template!r}",
            )
        ids[~needed] = codes.look_up(tokenizer, np.flatnonzero(~needed))
        source = TokenSource(template=template, tokenizer_digest=tokenizer_digest(folder))
        return cls(_by_level(ids, codebook_sizes, codes.text), source)

    @classmethod
    def from_bases(
        cls, bases: Sequence[int], codebook_sizes: Sequence[int], end_token_id: int | None = None
    ) -> "TokenMapping":
        """Compute token ids as base + code.

        Raises:
            UsageError: Another number of bases than levels, ids out of range, or ranges that overlap.
        """
        spelled = ",".join(map(str, bases))
        if len(bases) != len(codebook_sizes):
            what = f"--token-base {spelled} does not fit SIDs of {len(codebook_sizes)} levels"
            raise UsageError(what, fix="give one base per level")
        ends = [] if end_token_id is None else [end_token_id]
        after = [base + size for base, size in zip(bases, codebook_sizes, strict=True)]
        if min([*bases, *ends]) < 0 or max([*after, *(end + 1 for end in ends)]) > 2**31:
            raise UsageError(f"--token-base {spelled} leaves the range of token ids, 0 to 2^31 - 1")
        levels = [np.arange(base, end, dtype=np.int32) for base, end in zip(bases, after, strict=True)]
        flat = np.concatenate([*levels, np.array(ends, np.int32)])
        codes = _Codes(tuple(codebook_sizes), "code {code} of level {level}", "END" if ends else None)
        return cls(_by_level(flat, codebook_sizes, codes.text), TokenSource(bases=tuple(bases)))

    def check_codebooks(self, codebook_sizes: Sequence[int], end_codes: EndCodes) -> None:
        """Refuse a mapping that is of another layout than a trie.

        Raises:
            TrieFileError: Different levels, codebook sizes, or END.
        """
        wanted = [size + (end is not None) for size, end in zip(codebook_sizes, end_codes, strict=True)]
        have = [len(ids) for ids in self.token_ids]
        if wanted != have:
            what = f"the token mapping has {have} codes per level, the trie needs {wanted}"
            raise TrieFileError(what, "END of short SIDs counts as a code", "map the trie's own codebooks")


@dataclass(frozen=True, slots=True)
class _Codes:
    """The codes of all levels in one row, and END; each is spelled when needed, for they are many."""

    codebook_sizes: tuple[int, ...]
    template: str
    end_token: str | None

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(self.codebook_sizes) + (self.end_token is not None)

    def text(self, index: int) -> str:
        """The token of a code."""
        starts = list(accumulate(self.codebook_sizes, initial=0))
        level = bisect_right(starts, index) - 1
        if self.end_token is not None and index == starts[-1]:
            return self.end_token
        return _spell(self.template, level, index - starts[level], starts[level])

    def look_up(self, tokenizer: Any, indices: np.ndarray) -> np.ndarray:
        """Token ids of some codes, int32, -1 where the text is not one token."""
        ids = np.full(len(indices), -1, np.int32)
        for start in range(0, len(indices), CHUNK):
            texts = [self.text(index) for index in indices[start : start + CHUNK].tolist()]
            pieces = tokenizer(texts, add_special_tokens=False)["input_ids"]
            is_one = [len(piece) == 1 and piece[0] != tokenizer.unk_token_id for piece in pieces]
            ids[start : start + CHUNK] = [
                piece[0] if one else -1 for piece, one in zip(pieces, is_one, strict=True)
            ]
        return ids


def check_tokenizer(trie: "Trie", model: Path) -> bool:
    """Refuse a catalogue whose codes are other tokens in a model's tokenizer than where they were looked up.

    Returns:
        Whether that is known: not where the model has no tokenizer.

    Raises:
        UsageError: Names a code whose token id differs.
        TrieFileError: The tokenizer cannot be read.
    """
    mapping = trie.tokens
    if mapping is None or mapping.source.tokenizer_digest in (None, tokenizer_digest(model)):
        return True
    if not has_tokenizer(model):
        return False
    codes = _Codes(trie.codebook_sizes, mapping.source.template or "", trie.manifest.end_token)
    by_level = [ids[:size] for ids, size in zip(mapping.token_ids, trie.codebook_sizes, strict=True)]
    ours = np.concatenate([*by_level, mapping.token_ids[-1][trie.codebook_sizes[-1] :]])
    known = np.flatnonzero(ours >= 0)
    theirs = codes.look_up(load_tokenizer(model), known)
    for place in np.flatnonzero(theirs != ours[known])[:1].tolist():
        code, token_id = int(known[place]), int(theirs[place])
        what = f"{codes.text(code)!r} is token {ours[code]} in the trie"
        why = f"in the tokenizer of {model} it is {'no token' if token_id < 0 else token_id}"
        raise UsageError(what, why, f"build the trie with --tokenizer {model}")
    return True


def check_template(template: str) -> None:
    """Refuse a template that cannot spell codes.

    Args:
        template: Text with `{letter}` (a, b, c by level), `{level}` (0, 1, 2), and `{code}` or
            `{offset_code}` (the code plus the sizes of the levels before).

    Raises:
        UsageError: Unknown placeholders, or no code in it.
    """
    fix = "use {letter}, {level}, {code} and {offset_code}, as in '<s_{letter}_{code}>'"
    try:
        one, other = (_spell(template, 0, code, 0) for code in (0, 1))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise UsageError(f"the token template {template!r} cannot be read", f"at {error}", fix) from error
    if one == other:
        raise UsageError(f"the token template {template!r} has no code in it", fix=fix)


def _spell(template: str, level: int, code: int, offset: int) -> str:
    letter = string.ascii_lowercase[level]
    return template.format(letter=letter, level=level, code=code, offset_code=offset + code)


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a local folder.

    Raises:
        TrieFileError: There is none that can be read.
    """
    if not has_tokenizer(folder):
        fix = "give the folder of a checkpoint, with tokenizer.json in it"
        raise TrieFileError(f"no tokenizer in {folder}", fix=fix)
    for path in (folder / name for name in TOKENIZER_FILES if name.endswith(".json")):
        if path.is_file():
            _check_json(path)
    from transformers import AutoTokenizer

    with _Telling(folder):
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer, readable or not."""
    return any(os.path.isfile(folder / name) for name in TOKENIZER_FILES)


def _check_json(path: Path) -> None:
    try:
        why = "" if isinstance(json.loads(path.read_bytes()), dict) else "it is no JSON object"
    except (ValueError, RecursionError) as error:
        why = str(error)
    if why:
        raise TrieFileError(f"{path} cannot be read", why, "copy it again from its checkpoint")


class _Telling:
    """Makes what reading a tokenizer raises a `TrieFileError`; its Rust part raises `Exception` itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        known = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError)
        if kind is Exception or isinstance(error, known):
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            what = f"the tokenizer in {self._folder} cannot be read"
            raise TrieFileError(what, why, "copy tokenizer.json and tokenizer_config.json again") from error


def tokenizer_digest(folder: Path) -> str:
    """Digest of a folder's tokenizer files."""
    digest = xxhash.xxh3_128()
    for path in (folder / name for name in TOKENIZER_FILES):
        if path.is_file():
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _by_level(
    flat: np.ndarray, codebook_sizes: Sequence[int], text: Callable[[int], str]
) -> tuple[np.ndarray, ...]:
    """Split token ids of all codes (and END, if it is there) by level, once they are known to differ.

    Raises:
        UsageError: Two codes have one token id.
    """
    token_ids, counts = np.unique(flat[flat >= 0], return_counts=True)
    for token_id in token_ids[counts > 1]:
        same = " and ".join(text(index) for index in np.flatnonzero(flat == token_id)[:SHOWN].tolist())
        raise UsageError(f"{same} have one token id, {token_id}", "each code needs a token of its own")
    *levels, end = np.split(flat, np.cumsum(codebook_sizes))
    return (levels[0], *(np.append(ids, end) for ids in levels[1:]))
