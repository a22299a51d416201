"""A byte-level BPE tokenizer for the demo's texts, with one token for each code of each SID level."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKEN_TEMPLATE = "<s_{letter}_{code}>"
SID_BEGIN = "<|sid_begin|>"
"""The token after a text, which asks for a SID."""
END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], max_pieces: int, levels: int, codebook_size: int) -> "Tokenizer":
    """Learn at most `max_pieces` pieces of text, then add END_OF_TEXT, SID_BEGIN and the codes, by level."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=max_pieces, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    codes = [code_token(level, code) for level in range(levels) for code in range(codebook_size)]
    tokenizer.add_special_tokens([END_OF_TEXT, SID_BEGIN, *codes])
    return tokenizer


def code_token(level: int, code: int) -> str:
    """Spell a code."""
    return TOKEN_TEMPLATE.format(letter=chr(ord("a") + level), code=code)


def save_tokenizer(tokenizer: "Tokenizer", folder: Path) -> None:
    """Write the files of a Hugging Face tokenizer."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    wrapped.save_pretrained(folder)
