"""(level, code) -> token id: looked up in the tokenizer, or computed from one base per level."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from grinf.errors import TrieFileError, UsageError
from grinf.trie.manifest import EndCodes, TokenSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 5
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
        tokenizer = load_tokenizer(folder)
        texts = [
            _spell(template, level, code, sum(codebook_sizes[:level]))
            for level, size in enumerate(codebook_sizes)
            for code in range(size)
        ]
        ends = [] if end_token is None else [end_token]
        pieces: Any = tokenizer(texts + ends, add_special_tokens=False)["input_ids"]
        is_one = [len(ids) == 1 and ids[0] != tokenizer.unk_token_id for ids in pieces]
        is_needed = np.concatenate([*used, np.ones(len(ends), bool)]) if used else np.ones(len(pieces), bool)
        split = [
            f"{text!r} is {tokenizer.convert_ids_to_tokens(ids)}"
            for text, ids, one, needed in zip(texts + ends, pieces, is_one, is_needed, strict=True)
            if needed and not one
        ]
        if split:
            more = f"; and {len(split) - SHOWN:,} more" if len(split) > SHOWN else ""
            raise UsageError(
                f"{len(split):,} SID tokens are not one token each in {folder}",
                "; ".join(split[:SHOWN]) + more,
                f"add them to the tokenizer as tokens of their own, or correct the template {template!r}",
            )
        flat = np.array([ids[0] if one else -1 for ids, one in zip(pieces, is_one, strict=True)], np.int32)
        source = TokenSource(template=template, tokenizer_digest=tokenizer_digest(folder))
        return cls(_by_level(flat, codebook_sizes, texts + ends), source)

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
        levels = [base + np.arange(size) for base, size in zip(bases, codebook_sizes, strict=True)]
        flat = np.concatenate([*levels, np.array(ends, np.int64)])
        if flat.min() < 0 or flat.max() >= 2**31:
            raise UsageError(f"--token-base {spelled} leaves the range of token ids, 0 to 2^31 - 1")
        texts = [f"code {code} of level {n}" for n, size in enumerate(codebook_sizes) for code in range(size)]
        token_ids = _by_level(flat.astype(np.int32), codebook_sizes, texts + ["END"] * len(ends))
        return cls(token_ids, TokenSource(bases=tuple(bases)))

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
    fix = "give the folder of a checkpoint, with tokenizer.json in it"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise TrieFileError(f"no tokenizer in {folder}", fix=fix)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrieFileError(f"the tokenizer in {folder} cannot be read", why, fix) from error


def tokenizer_digest(folder: Path) -> str:
    """Digest of a folder's tokenizer files."""
    digest = xxhash.xxh3_128()
    for path in (folder / name for name in TOKENIZER_FILES):
        if path.is_file():
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _by_level(flat: np.ndarray, codebook_sizes: Sequence[int], texts: list[str]) -> tuple[np.ndarray, ...]:
    """Split token ids of all codes (and END, if it is there) by level, once they are known to differ.

    Raises:
        UsageError: Two codes have one token id.
    """
    token_ids, counts = np.unique(flat[flat >= 0], return_counts=True)
    for token_id in token_ids[counts > 1]:
        same = " and ".join(texts[index] for index in np.flatnonzero(flat == token_id)[:SHOWN])
        raise UsageError(f"{same} have one token id, {token_id}", "each code needs a token of its own")
    *levels, end = np.split(flat, np.cumsum(codebook_sizes))
    return (levels[0], *(np.append(ids, end) for ids in levels[1:]))
