"""Prompts: from a column of queries to token ids; a row that cannot be read becomes its error."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from grinf.errors import RowError, UsageError
from grinf.jobs.recall.columns import InputKind, values
from grinf.jobs.recall.history import HistoryPrompter
from grinf.jobs.recall.sid_lookup import SidLookup
from grinf.jobs.recall.tokenizer import CHAT, Prompt, PromptTokenizer, Template
from grinf.trie.tokens import has_tokenizer

if TYPE_CHECKING:
    from grinf.trie import Trie

Prompter = Callable[[pa.ChunkedArray], list[Prompt]]
"""Turns the input column of a unit into one prompt per row."""

ChatReader = Callable[[Any], list[dict[str, str]]]


def make_prompter(
    field: pa.Field,
    kind: InputKind,
    model: Path,
    template: str | None,
    suffix: Sequence[str],
    trie: "Trie | None",
) -> Prompter:
    """Choose how prompts are made.

    Args:
        field: The input column. kind: what it holds.
        model: Checkpoint; its tokenizer is loaded only where it is needed.
        template: A `Template`, or `chat`; None: the prompt as it is (messages: `chat`).
        suffix: Tokens to append to every prompt.
        trie: The catalogue, for histories.

    Raises:
        UsageError: A template or suffix that cannot be used with this input or tokenizer.
        TrieFileError: A tokenizer that is missing or cannot be read.
    """
    takes = {"input_ids": False, "text": True, "history": template != CHAT, "messages": template == CHAT}
    if template is not None and not takes[kind]:
        raise UsageError(f"--template {template} does not fit a column of {kind}", fix="leave --template out")
    around = Template.parse(template) if template not in (None, CHAT) else Template()
    if kind == "input_ids":
        tail = PromptTokenizer(model).suffix_ids(suffix) if suffix else []
        return lambda column: [_token_ids(value, tail) for value in values(column)]
    if kind == "history":
        if trie is None:
            raise UsageError(
                "a history needs a trie", "items and codes become tokens by it", "add --trie FILE"
            )
        lookup = SidLookup(field.name, field.type, trie, trie.levels)
        return HistoryPrompter(
            lookup, trie, PromptTokenizer(model) if has_tokenizer(model) else None, around, suffix
        )
    chat = read_messages if kind == "messages" else _as_user if template == CHAT else None
    return TextPrompter(PromptTokenizer(model), around, suffix, chat)


class TextPrompter:
    """Prompts from text or messages.

    Args:
        tokenizer: Of the checkpoint.
        around: Text around a prompt.
        suffix: Tokens to append, unless the text ends in them.
        chat: Reads a value as a conversation, for the chat template; None: the value is the text.

    Raises:
        UsageError: The checkpoint has no chat template, or the suffix is not of its tokens.
    """

    def __init__(
        self, tokenizer: PromptTokenizer, around: Template, suffix: Sequence[str], chat: ChatReader | None
    ) -> None:
        if chat is not None and not tokenizer.has_chat_template:
            fix = "use a checkpoint that has one, or a column of prompts with --template TEXT"
            raise UsageError("the checkpoint has no chat template", fix=fix)
        self._tokenizer, self._around, self._chat = tokenizer, around, chat
        self._tail = tokenizer.suffix_ids(suffix)

    def __call__(self, column: pa.ChunkedArray) -> list[Prompt]:
        """Make the prompts of a unit."""
        texts = [self._text(value) for value in values(column)]
        good = [text for text in texts if isinstance(text, str)]
        # A chat template writes the token that begins a text itself.
        encoded = self._tokenizer.encode(good, begin=self._chat is None)
        return [text if isinstance(text, RowError) else self._finish(next(encoded)) for text in texts]

    def _text(self, value: Any) -> str | RowError:
        try:
            text = self._render(value)
            text.encode()  # JSON can spell half of a surrogate pair, which is no text.
            return text
        except UnicodeEncodeError as error:
            return RowError("bad_type", "the text is not valid Unicode", str(error))
        except RowError as error:
            return error.kept()

    def _render(self, value: Any) -> str:
        if value is None or isinstance(value, RowError):
            raise value or RowError("null_input", "the input is null")
        if self._chat is None:
            return f"{self._around.before}{value}{self._around.after}"
        return self._tokenizer.render_chat(self._chat(value))

    def _finish(self, ids: list[int]) -> np.ndarray:
        has_tail = self._tail and ids[-len(self._tail) :] == self._tail
        return np.array(ids if has_tail else ids + self._tail, np.int64)


def _token_ids(value: Any, tail: list[int]) -> Prompt:
    if value is None:
        return RowError("null_input", "the input is null")
    try:
        return np.array(value + tail, np.int64)
    except TypeError:
        return RowError("bad_token", "the token ids have a null in them")
    except OverflowError:
        return RowError("bad_token", f"token id {max(value)} is outside every vocabulary")


def _as_user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def read_messages(value: Any) -> list[dict[str, str]]:
    """Read a conversation: a list of {role, content}, or its JSON; content is text or a list of text parts.

    Raises:
        RowError: It is none.
    """
    try:
        messages = json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError) as error:
        raise RowError("bad_type", f"the messages are not JSON: {value[:80]}", str(error)) from error
    if not isinstance(messages, list):
        raise RowError("bad_type", f"the messages are no list: {str(messages)[:80]}")
    return [_message(message) for message in cast(list[Any], messages)]


def _message(message: Any) -> dict[str, str]:
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    )
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        content = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise RowError("bad_type", f"a message needs a role and a text: {str(message)[:80]}")
    return {"role": role, "content": content}
