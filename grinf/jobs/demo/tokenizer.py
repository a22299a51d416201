"""A byte-level BPE tokenizer for the demo's texts, with one token for each code of each SID level."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKEN_TEMPLATE = "<s_{letter}_{code}>"
SID_BEGIN = "<|sid_begin|>"
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class SidTokenizer:
    """Token ids in order: pieces of text, END_OF_TEXT, SID_BEGIN, then the codes, level by level.

    Attributes:
        num_pieces: Ids below this are pieces of text.
    """

    bpe: "Tokenizer"
    num_pieces: int
    codebook_size: int

    @property
    def num_ids(self) -> int:
        """All ids."""
        return self.bpe.get_vocab_size()

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, each with the token that asks for a SID."""
        return [[*found.ids, self.num_pieces + 1] for found in self.bpe.encode_batch(texts)]

    def code_id(self, level: int, code: int) -> int:
        """Token id of a code."""
        return self.num_pieces + 2 + level * self.codebook_size + code

    def save(self, folder: Path) -> None:
        """Write the files of a Hugging Face tokenizer."""
        from transformers import PreTrainedTokenizerFast

        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=self.bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
        )
        wrapped.save_pretrained(folder)


def train_tokenizer(texts: Iterable[str], max_pieces: int, levels: int, codebook_size: int) -> SidTokenizer:
    """Learn at most `max_pieces` pieces of text, then add the special and the SID tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=max_pieces, show_progress=False, initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    num_pieces = bpe.get_vocab_size()
    codes = [
        TOKEN_TEMPLATE.format(letter=chr(ord("a") + level), code=code)
        for level in range(levels)
        for code in range(codebook_size)
    ]
    bpe.add_special_tokens([END_OF_TEXT, SID_BEGIN, *codes])
    return SidTokenizer(bpe, num_pieces, codebook_size)
