"""Where the demo's files are, what grinf.toml says about them, and that nobody else's files are touched."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from grinf.config.load import LOCAL_FILE
from grinf.config.settings import DemoSettings
from grinf.errors import UsageError
from grinf.jobs import outputs
from grinf.jobs.build_trie import default_output
from grinf.jobs.demo.report import DemoReport
from grinf.trie import store
from grinf.trie.publish import replacing

MARK = "# Written by `grinf demo`"
_SETTINGS_FILE = """{mark}, so that these run with no further flag:
#   grinf build-trie {items}
#   grinf recall --input {queries}
#   grinf bench --sla 100ms
model = {model}
trie = {trie}
beams = "{beams}"

[build-trie]
tokenizer = {model}
token_template = "{template}"

[recall]
input_column = "prompt"
truth_column = "truth"
suffix = ["{suffix}"]
"""


@dataclass(frozen=True, slots=True)
class DemoState:
    """What the demo's folder says of itself: what decides its content, and the report once it is done."""

    made_by: dict[str, int]
    report: DemoReport | None


_STATE = TypeAdapter(DemoState)


class DemoFiles:
    """The demo's folder, and the two files outside of it: the trie and `grinf.toml`.

    Attributes:
        items: The catalogue with its SIDs. queries: The held-out test queries with their truth.
        model: Checkpoint and tokenizer. trie: Where `grinf build-trie` puts the trie of `items`.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self.folder = outputs.place(settings.output)
        self.items, self.queries = self.folder / "items.parquet", self.folder / "queries.parquet"
        self.model, self.trie = self.folder / "model", default_output(self.folder / "items.parquet")
        self._state = self.folder / "demo.json"
        self._overwrite = settings.overwrite
        self._made_by = {"full": settings.full, "seed": settings.seed}

    def answers(self, name: str) -> Path:
        """Where an output of `grinf recall` goes."""
        return self.folder / "recall" / f"{name}.parquet"

    def claim(self) -> DemoReport | None:
        """Take the places that the demo writes to, or find that all is done.

        Returns:
            The report of an earlier run with the same settings, if its files are still there.

        Raises:
            UsageError: A file of someone else, or of other settings, is in the way.
        """
        state = self._read_state()
        self._refuse_others(state)
        is_whole = all(path.exists() for path in (self.items, self.model, self.trie))
        if state and state.report and is_whole and not self._overwrite:
            return replace(state.report, is_new=False)
        self.keep(None)
        return None

    def keep(self, report: DemoReport | None) -> None:
        """Write down whose folder this is, and what was found out; None: the demo is not finished."""
        with replacing(self._state) as temporary:
            temporary.write_bytes(_STATE.dump_json(DemoState(self._made_by, report), indent=1))

    def write_settings(self, template: str, suffix: str, beams: str) -> None:
        """Write `grinf.toml` into the working directory."""
        paths = {"model": json.dumps(str(self.model)), "trie": json.dumps(str(self.trie))}
        names = {"items": self.items, "queries": self.queries, "template": template, "suffix": suffix}
        text = _SETTINGS_FILE.format(mark=MARK, beams=beams, **paths, **names)
        with replacing(LOCAL_FILE) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def _read_state(self) -> DemoState | None:
        """What an earlier run wrote down; None: there was none."""
        try:
            return _STATE.validate_json(self._state.read_bytes())
        except (OSError, ValidationError):
            return None

    def _refuse_others(self, state: DemoState | None) -> None:
        if LOCAL_FILE.exists() and not LOCAL_FILE.read_bytes().startswith(MARK.encode()):
            fix = "run the demo in another folder, or move the file away"
            raise UsageError(f"{LOCAL_FILE} exists", "`grinf demo` did not write it", fix)
        if state is not None:
            if state.made_by != self._made_by and not self._overwrite:
                fix = "run the demo in another folder, or replace it by --overwrite"
                raise UsageError(f"{self.folder} is a demo with other settings", f"{state.made_by}", fix)
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UsageError(f"{self.folder} exists", "`grinf demo` did not make it", "choose another -o")
        elif self.trie.exists() and not (self._overwrite and store.is_ours(self.trie)):
            fix = "run the demo in another folder, or replace a trie by --overwrite"
            raise UsageError(f"{self.trie} exists", "the trie of the demo would replace it", fix)


def write_table(path: Path, columns: dict[str, Any]) -> None:
    """Write a parquet file in one step; a column is an Arrow array or a list of values."""
    with replacing(path) as temporary:
        pq.write_table(pa.table(columns), temporary, compression="zstd")
