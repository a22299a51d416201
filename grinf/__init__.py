"""Generative retrieval with Semantic IDs: a prompt in, legal SIDs and their items out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grinf.backend.interface import EngineOptions as EngineOptions
    from grinf.runtime.engine import Engine as Engine
    from grinf.state.request import RecallResult as RecallResult
    from grinf.state.request import Request as Request
    from grinf.trie import Trie as Trie

__version__ = "0.1.0"

_HOMES = {
    "Engine": "grinf.runtime.engine",
    "EngineOptions": "grinf.backend.interface",
    "RecallResult": "grinf.state.request",
    "Request": "grinf.state.request",
    "Trie": "grinf.trie",
}

__all__ = ["Engine", "EngineOptions", "RecallResult", "Request", "Trie", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import grinf` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'grinf' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
