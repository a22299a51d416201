"""The catalogue: SIDs and items as a CSR trie, its file, and the walk over it."""

from grinf.trie.build import trie_of
from grinf.trie.csr import Trie
from grinf.trie.tokens import TokenMapping

__all__ = ["TokenMapping", "Trie", "trie_of"]
