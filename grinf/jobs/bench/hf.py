"""The baseline that needs no new software: `transformers.generate`, one request at a time."""

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grinf.backend.interface import EngineOptions
from grinf.errors import RowError, UsageError
from grinf.model.config import read_config
from grinf.model.weights import random_fetch
from grinf.state.request import RecallResult, Request
from grinf.trie import Trie


class HfEngine:
    """Beam search of Hugging Face transformers over the same weights.

    Raises:
        UsageError: A schedule that is not one fixed width, or scores that are not over the full vocabulary.
    """

    def __init__(self, options: EngineOptions, trie: Trie | None) -> None:
        if not self.can_search(options):
            why = "transformers knows one fixed width and full-vocabulary scores"
            raise UsageError("--engine hf cannot run this point", why, "use --beams 900 --score vocab")
        self._width, self._trie = options.beams[0], trie
        self.levels = trie.levels if trie is not None else options.levels or 3
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(name if options.device == "auto" else options.device)
        self._model: Any = load_hf_model(options, self._device)
        self.vocab_rows: int = self._model.config.vocab_size
        self._waiting: deque[Request] = deque()

    @staticmethod
    def can_search(options: EngineOptions) -> bool:
        """Whether transformers knows this search."""
        return len(set(options.beams)) == 1 and options.score == "vocab" and options.score_margin is None

    @property
    def max_context(self) -> int:
        """Longest prompt, tokens."""
        return int(self._model.config.max_position_embeddings) - self.levels

    @property
    def is_idle(self) -> bool:
        """Whether no request waits."""
        return not self._waiting

    def submit(self, request: Request) -> None:
        """Queue a request."""
        request.timeline.submitted_ns = time.perf_counter_ns()
        self._waiting.append(request)

    def step(self) -> list[RecallResult]:
        """Answer the oldest request; running out of memory is an answer, too."""
        request = self._waiting.popleft()
        request.timeline.admitted_ns = time.perf_counter_ns()
        sids, error = np.empty((0, self.levels), np.int32), None
        try:
            sids = self._generate(request)
        except torch.OutOfMemoryError as full:
            torch.cuda.empty_cache()
            what = f"{self._width} beams of {request.context_len} tokens"
            error = RowError("out_of_memory", what, str(full))
        request.timeline.done_ns = time.perf_counter_ns()
        scores = np.full(len(sids), np.nan, np.float32)
        return [RecallResult(request.request_id, sids, scores, None, request.timeline, error)]

    def _generate(self, request: Request) -> np.ndarray:
        prompt = torch.tensor([list(request.input_ids)], device=self._device)
        legal = None if self._trie is None else LegalTokens(self._trie, request.context_len)
        with torch.inference_mode():
            out = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=self._width,
                num_return_sequences=self._width,
                min_new_tokens=self.levels,
                max_new_tokens=self.levels,
                length_penalty=0.0,
                do_sample=False,
                early_stopping=False,
                eos_token_id=None,
                pad_token_id=0,
                prefix_allowed_tokens_fn=legal,
            )
        tokens = out[:, request.context_len :].cpu().numpy().astype(np.int32)
        return tokens if legal is None else legal.sids(tokens)

    def describe(self) -> dict[str, Any]:
        """Library, device and dtype."""
        where = {"device": str(self._device), "dtype": str(self._model.dtype)}
        return {"engine": "transformers.generate", **where}

    def close(self) -> None:
        """Free the weights."""
        del self._model


class LegalTokens:
    """The children of a beam's node in the trie, as `prefix_allowed_tokens_fn` wants them."""

    def __init__(self, trie: Trie, context_len: int) -> None:
        assert trie.token_ids is not None
        self._trie, self._context_len, self._tokens = trie, context_len, trie.token_ids
        self._code_of = [dict(zip(ids.tolist(), range(len(ids)), strict=True)) for ids in trie.token_ids]

    def __call__(self, batch_id: int, input_ids: torch.Tensor) -> list[int]:
        """Token ids that may follow; [0] after an illegal prefix, which transformers keeps with -inf."""
        first, end = 0, self._trie.num_nodes[0]
        path = input_ids[self._context_len :].tolist()
        for level, token in enumerate(path):
            codes, code = self._trie.codes[level], self._code_of[level].get(token, -1)
            node = first + int(np.searchsorted(codes[first:end], max(code, 0)))
            if node >= end or codes[node] != code:
                return [0]
            first, end = (int(self._trie.child_ptr[level][node + side]) for side in (0, 1))
        return self._tokens[len(path)][self._trie.codes[len(path)][first:end]].tolist()

    def sids(self, tokens: np.ndarray) -> np.ndarray:
        """The distinct SIDs of the catalogue among generated tokens, best first, without padding."""
        look_up = np.vectorize(lambda known, token: known.get(token, -1), otypes=[np.int32])
        sids = np.array(list(dict.fromkeys(map(tuple, look_up(self._code_of, tokens).tolist()))), np.int32)
        return sids[self._trie.leaf_of(sids) >= 0]


def load_hf_model(options: EngineOptions, device: torch.device) -> Any:
    """The model of transformers with the weights that grinf would use, also for an architecture file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(options.model)
    natural = read_config(path).dtype if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, natural if options.dtype == "auto" else options.dtype)
    if path.is_dir():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return model.to(device).eval()
    config = AutoConfig.for_model(**json.loads(path.read_text()))
    with device:  # where transformers' own random weights, which are not wanted, take no time
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    draw = random_fetch(options.seed, dtype, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, tuple(parameter.shape)))
    return model
