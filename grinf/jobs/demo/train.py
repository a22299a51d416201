"""Train the demo's retriever: a small Qwen3 that reads a text and writes the SID of its item."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grinf.jobs.demo.embed import Embed
from grinf.jobs.demo.tokenizer import END_OF_TEXT, SID_BEGIN, code_token

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

Example = tuple[str, Sequence[int]]
"""A text, and the SID of the item that it means."""

BATCH = 128
LEARNING_RATE = 3e-3
MAX_WARM_UP = 100
"""Steps in which the learning rate rises, but a fifth of all at most."""
QUERY_REPEATS = 3
"""A training query is seen this often for each time that a title is: it looks like the queries to come."""
IGNORED = -100
"""Label of a position that is not learned (the convention of `cross_entropy`)."""


def build_model(tokenizer: "Tokenizer", codebooks: Sequence[np.ndarray], embed: Embed, seed: int) -> Any:
    """Make a Qwen3 whose embeddings start where the meaning is already known.

    The row of a piece of text is the embedding of its letters, the row of a SID token is its centroid: both
    lie in the same space. Everything else starts at random.

    Args:
        tokenizer: Its pieces of text come first, then END_OF_TEXT.
        codebooks: Per level float32 [codes, hidden].
        embed: Gives vectors of length `hidden`.
        seed: Of the random weights.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, id_of = codebooks[0].shape[1], tokenizer.get_vocab()
    end = id_of[END_OF_TEXT]
    config = Qwen3Config(
        vocab_size=len(id_of),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
    rows = model.get_input_embeddings().weight.data
    _start_at(rows[:end], embed([tokenizer.decode([piece]) for piece in range(end)]))
    for level, centroids in enumerate(codebooks):
        start = id_of[code_token(level, 0)]
        _start_at(rows[start : start + len(centroids)], centroids)
    return model


def _start_at(rows: "torch.Tensor", vectors: np.ndarray) -> None:
    """Fill rows with vectors, scaled to length 1 on average, unless these are nothing but rounding errors."""
    import torch

    length = float(np.linalg.norm(vectors, axis=1).mean())
    if length > 1e-6:
        rows[:] = torch.from_numpy(vectors / length)


def save_model(model: Any, folder: Path) -> None:
    """Write a Hugging Face checkpoint in bfloat16."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # It is written in no time.
    model.bfloat16().save_pretrained(folder)


def train(
    model: Any,
    tokenizer: "Tokenizer",
    titles: Sequence[Example],
    queries: Sequence[Example],
    steps: int,
    seed: int,
    on_step: Callable[[int], None],
) -> float:
    """Teach the model to write SIDs, in `steps` steps of AdamW; the loss counts SID tokens only.

    Returns:
        The loss of the last steps, nats per SID token.
    """
    import torch
    from torch.nn.functional import cross_entropy

    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    batches = _batches(tokenizer, [*titles, *(list(queries) * QUERY_REPEATS)], random.Random(seed))
    recent: list[float] = []
    model.train()
    for step in range(steps):
        ids, labels = next(batches)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        learned = labels != IGNORED
        loss = cross_entropy(model.lm_head(hidden[learned]), labels[learned])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent[-19:], loss.item()]
        on_step(step + 1)
    model.eval()
    return sum(recent) / len(recent)


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate: a linear rise, then a cosine down to 2 %."""
    rise = (step + 1) / min(MAX_WARM_UP, 1 + steps // 5)
    return min(1.0, rise) * max(0.02, 0.5 * (1 + math.cos(math.pi * step / steps)))


def _batches(
    tokenizer: "Tokenizer", examples: Sequence[Example], rng: random.Random
) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """Yield batches for ever; each epoch varies the texts anew and puts examples of like length together."""
    spelled = ["".join(code_token(level, code) for level, code in enumerate(sid)) for _, sid in examples]
    sids = [found.ids for found in tokenizer.encode_batch(spelled)]
    while True:
        texts = [vary(text, rng) + SID_BEGIN for text, _ in examples]
        prompts = [found.ids for found in tokenizer.encode_batch(texts)]
        order = sorted(range(len(examples)), key=lambda i: len(prompts[i]) + 4 * rng.random())
        chunks = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        rng.shuffle(chunks)
        for chunk in chunks:
            yield _pad([(prompts[i], sids[i]) for i in chunk])


def _pad(rows: Sequence[tuple[list[int], list[int]]]) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Lay out prompts and SIDs as int64 [rows, longest]; a SID token is the label of the position before.

    Padding stands on the right, where no causal attention reaches it. The last SID token is never an input.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(prompt + sid[:-1]) for prompt, sid in rows]
    labels = [torch.tensor([IGNORED] * (len(prompt) - 1) + sid) for prompt, sid in rows]
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def vary(text: str, rng: random.Random) -> str:
    """Drop or shuffle some words, or lower the first letter: queries are worded more freely than titles."""
    words = text.split()
    if len(words) > 2 and rng.random() < 0.5:
        words = [word for word in words if rng.random() > 0.15] or words
    if len(words) > 2 and rng.random() < 0.15:
        rng.shuffle(words)
    text = " ".join(words)
    return text[:1].lower() + text[1:] if rng.random() < 0.3 else text
