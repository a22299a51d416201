"""A point of the sweep: what is asked of which engine. Its key names files and matches runs."""

import hashlib
import re
from dataclasses import dataclass, replace

from grinf.config.parse import format_beams

SYNTHETIC = "synthetic:"


@dataclass(frozen=True, slots=True)
class Point:
    """One row of the summary.

    Attributes:
        engine: Engine as the user spelled it.
        input_len: Prompt tokens.
        beams: Beam schedule; a single number holds for all levels.
        catalog: Trie file or `synthetic:...`; empty: the search is free.
        score: Score mode.
    """

    engine: str
    input_len: int
    beams: tuple[int, ...]
    catalog: str
    score: str

    @property
    def work(self) -> str:
        """Name of the work without the engine, safe in a file name: equal for two engines.

        A file's name is followed by a digest of its path: files of several folders may share it.
        """
        catalog = file_name(self.catalog.rsplit("/", 1)[-1]) or "free"
        if self.catalog and not self.catalog.startswith(SYNTHETIC):
            catalog += "-" + hashlib.sha256(self.catalog.encode()).hexdigest()[:6]
        return f"len{self.input_len}_beams{format_beams(self.beams)}_{catalog}_{file_name(self.score)}"

    @property
    def key(self) -> str:
        """Name of the point, unique within a run."""
        return f"{file_name(self.engine)}_{self.work}"

    @property
    def constraint(self) -> str:
        """`free` or `constrained`."""
        return "constrained" if self.catalog else "free"

    def of(self, engine: str) -> "Point":
        """The same work for another engine."""
        return replace(self, engine=engine)

    def seed(self, base: int, probe_id: int) -> int:
        """Seed of a probe: the same for every engine, so that two meet the same arrivals and prompts."""
        digest = hashlib.sha256(f"{base}/{self.work}/{probe_id}".encode()).digest()
        return int.from_bytes(digest[:6], "little")


def file_name(text: str) -> str:
    """A spelling with what a file's name may hold."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
