"""A tiny retriever for the tests of `grinf recall`: a random Qwen3, its tokenizer, a catalogue, a trie."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grinf.config.settings import BuildTrieSettings, RecallSettings
from grinf.jobs.build_trie import run_build_trie
from grinf.jobs.recall import RecallReport, run_recall
from tests.golden.oracle import Oracle

WORDS = 30
CODES = 8
LEVELS = 3
SID_BEGIN, END, BOS, EOS, UNKNOWN = "<sid>", "<end>", "<s>", "</s>", "<unk>"
SPECIAL = (SID_BEGIN, END, BOS, EOS, UNKNOWN)
SID_TOKENS = [f"<{letter}_{code}>" for letter in "abc" for code in range(CODES)]
VOCABULARY = {
    token: i for i, token in enumerate([f"w{i}" for i in range(WORDS)] + SID_TOKENS + list(SPECIAL))
}
MAX_CONTEXT = 48 - LEVELS
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'nobody' %}{{ raise_exception('nobody speaks') }}{% endif %}"
    "{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w1{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} w2{% endif %}"
)


def ignore(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


def stop_after(queries: int) -> Callable[[str, int, int | None], None]:
    """A progress callback that ends the job in the middle of a unit."""

    def on_progress(stage: str, done: int, total: int | None) -> None:
        if stage == "queries" and done == queries:
            raise KeyboardInterrupt

    return on_progress


def write(path: Path, columns: Mapping[str, Any], row_group_size: int | None = None) -> Path:
    pq.write_table(pa.table(dict(columns)), path, row_group_size=row_group_size)
    return path


def ids_of(text: str) -> list[int]:
    """Token ids of a text of known words."""
    return [VOCABULARY[word] for word in text.split()]


def save_tokenizer(folder: Path, *, bos: bool = False) -> None:
    """Save a tokenizer of whole words; with `bos` it puts <s> before and </s> behind a text, as some do."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SID_TOKENS, *SPECIAL)])
    if bos:
        ids = [(token, VOCABULARY[token]) for token in (BOS, EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=ids)
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)


@dataclass(frozen=True)
class World:
    """Where everything is.

    Attributes:
        sids: SID of each item; the item ids are 100, 101, ...
    """

    folder: Path
    sids: list[tuple[int, ...]]
    has_short: bool

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def trie(self) -> Path:
        return self.folder / "catalogue.grtrie"

    @cached_property
    def oracle(self) -> Oracle:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype="float32").eval()
        end = VOCABULARY[END] if self.has_short else None
        tokens = [[VOCABULARY[f"<{letter}_{code}>"] for code in range(CODES)] for letter in "abc"]
        return Oracle(model, sorted(set(self.sids)), tokens, end)

    def items_of(self, sid: tuple[int, ...]) -> list[int]:
        return [100 + index for index, other in enumerate(self.sids) if other == sid]

    def settings(self, **changes: Any) -> RecallSettings:
        """Settings of a search with this world's model and catalogue; None takes one away."""
        defaults = {"model": str(self.model), "trie": str(self.trie), "beams": "6", "device": "cpu"}
        return RecallSettings.model_validate({k: v for k, v in (defaults | changes).items() if v is not None})

    def recall(self, path: Path, columns: Mapping[str, Any] | None = None, **changes: Any) -> RecallReport:
        """Write queries beside `path`, the output, and answer them."""
        if columns is not None:
            changes["input"] = str(write(path.with_name("queries.parquet"), columns))
        return run_recall(self.settings(output=str(path), **changes), ignore)


def draw_prompts(rng: np.random.Generator, count: int, shortest: int = 1) -> list[list[int]]:
    """Token ids of prompts of different lengths."""
    return [rng.integers(0, 50, length).tolist() for length in rng.integers(shortest, 30, count)]


def make_world(folder: Path, *, short: bool = False) -> World:
    """Make a model and a catalogue of 60 items on at most 50 SIDs, some of them short if `short`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": len(VOCABULARY) + 5, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(
        **sizes, **heads, tie_word_embeddings=False, initializer_range=0.4, max_position_embeddings=48
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    rng = np.random.default_rng(2)
    rows = rng.integers(0, CODES, (50, LEVELS)).tolist()
    if short:
        rows = [
            row[:depth] for row, depth in zip(rows, rng.integers(1, LEVELS + 1, 49), strict=False)
        ] + rows[-1:]
    sids = [tuple(row) for row in rows + rows[:10]]
    items = write(folder / "items.parquet", {"item_id": np.arange(100, 100 + len(sids)), "sid": sids})
    build = {"items": [str(items)], "output": str(folder / "catalogue.grtrie")}
    tokens = {
        "tokenizer": str(folder / "model"),
        "token_template": "<{letter}_{code}>",
        "codebook_sizes": "8,8,8",
    }
    settings = BuildTrieSettings.model_validate(build | tokens | ({"end_token": END} if short else {}))
    run_build_trie(settings, ignore)
    return World(folder, sids, short)
