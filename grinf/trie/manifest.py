"""What a trie file says about itself: shape, provenance, digests."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

FORMAT_VERSION = 1
"""Changes whenever a reader of the version before would misread the file."""

EndCodes = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A file that items came from; `digest` is the xxh3_128 of its bytes."""

    path: str
    num_bytes: int
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where token ids came from: a tokenizer and a template, or one base id per level."""

    template: str | None = None
    tokenizer_digest: str | None = None
    bases: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a trie, kept in the header of its file.

    Attributes:
        codebook_sizes: K of each level; codes are 0..K-1.
        end_token: Text of the token that ends a short SID; None: every SID has all levels.
        num_nodes: Nodes per level.
        num_items: Rows of the item index: pairs of an item and its SID.
        items_on_several_sids: Items that were found on more than one SID.
        rows_read: Rows of all sources.
        rows_dropped: Rows that are not in the trie, by reason.
        settings: How the trie was built, where it bears on the content.
        digests: xxh3_128 of each tensor's bytes.
        content_digest: Digest of all tensors; equal for equal catalogues, whatever their files and row order.
    """

    codebook_sizes: tuple[int, ...]
    end_token: str | None
    num_nodes: tuple[int, ...]
    num_items: int
    items_on_several_sids: int
    id_type: Literal["int64", "string"]
    rows_read: int
    rows_dropped: dict[str, int]
    tokens: TokenSource | None
    sources: tuple[Source, ...]
    settings: dict[str, Any]
    digests: dict[str, str]
    content_digest: str
    format_version: int
    grinf_version: str

    def to_json(self) -> str:
        """Serialise."""
        return _adapter().dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read what `to_json` wrote.

        Raises:
            ValueError: Not a manifest of this format version.
        """
        return _adapter().validate_json(text)


def end_codes(codebook_sizes: tuple[int, ...], end_token: str | None) -> EndCodes:
    """Code that ends a short SID, per level: one past the last real code; there is no empty SID to end."""
    has_end = end_token is not None
    return tuple(size if has_end and level > 0 else None for level, size in enumerate(codebook_sizes))


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)
