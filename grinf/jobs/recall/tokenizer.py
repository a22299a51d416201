"""Text into token ids: tokenised once, special tokens never added twice, nothing ever decoded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grinf.errors import RowError, UsageError
from grinf.trie.tokens import load_tokenizer

CHAT = "chat"
"""The value of --template that asks for the checkpoint's own chat template."""

Prompt = np.ndarray | RowError
"""Token ids, int64 [n], or why there are none."""

_PLACEHOLDER = re.compile(r"\{(?:input|prompt|query|history)(?::([^{}]*))?\}")
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Template:
    """Text around a prompt.

    Attributes:
        separator: Text between the SIDs of a history.
    """

    before: str = ""
    after: str = ""
    separator: str = ""

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Read `<|query|> {prompt} <|sid|>`; `{history:, }` separates SIDs by a comma; other braces are text.

        Raises:
            UsageError: No placeholder, or more than one.
        """
        found = list(_PLACEHOLDER.finditer(text))
        if len(found) != 1:
            why = (
                f"it has {len(found)} places for the prompt: {{prompt}}, {{query}}, {{history}} or {{input}}"
            )
            raise UsageError(f"--template {text!r} cannot be filled", why, "write one of them, or chat")
        (match,) = found
        return cls(text[: match.start()], text[match.end() :], match[1] or "")


class PromptTokenizer:
    """The tokenizer of a checkpoint.

    Args:
        folder: Checkpoint folder.

    Raises:
        TrieFileError: There is no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = load_tokenizer(folder)
        # What becomes of an empty text shows what the tokenizer adds; an end of text would end the prompt.
        added = self._tokenizer("").input_ids
        self._begin = added[:1] if added and added[0] == self._tokenizer.bos_token_id else []

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation is written."""
        return bool(self._tokenizer.chat_template)

    def encode(self, texts: Sequence[str], *, begin: bool = False) -> Iterator[list[int]]:
        """Token ids of texts; special tokens that a text spells out become their ids.

        Args:
            texts: Any number.
            begin: Put the token first that the tokenizer puts before a text, unless it is there already.
        """
        for start in range(0, len(texts), _BATCH):
            part = list(texts[start : start + _BATCH])
            for ids in self._tokenizer(part, add_special_tokens=False, verbose=False).input_ids:
                yield ids if not begin or ids[: len(self._begin)] == self._begin else self._begin + ids

    def suffix_ids(self, tokens: Sequence[str]) -> list[int]:
        """Ids of the tokens of --suffix.

        Raises:
            UsageError: A text that is not exactly one token.
        """
        ids: list[int] = []
        for token, pieces in zip(tokens, self.encode(tokens), strict=True):
            if len(pieces) != 1 or pieces[0] == self._tokenizer.unk_token_id:
                shown = " ".join(map(repr, self._tokenizer.convert_ids_to_tokens(pieces))) or "nothing"
                why = f"the tokenizer of the checkpoint reads {shown}"
                raise UsageError(f"--suffix {token} is not one token", why, "name tokens of its vocabulary")
            ids += pieces
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Write a conversation by the checkpoint's chat template, up to where the answer begins.

        Raises:
            RowError: The template refuses the messages.
        """
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError("bad_messages", "the chat template refuses the messages", str(error)) from error
