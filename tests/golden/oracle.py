"""A beam search by exhaustive teacher forcing with transformers: slow, plain, and independent."""

import math
from collections.abc import Sequence
from itertools import groupby

import torch

END = -1


class Oracle:
    """Searches a catalogue under any score mode by scoring prefixes with a Hugging Face model.

    Args:
        model: Causal language model.
        sids: Codes of each SID; shorter than `levels` only with an end token.
        token_of: Per level, token id of each code.
        end_token: Token id that ends a short SID.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sids: Sequence[tuple],
        token_of: Sequence[Sequence[int]],
        end_token: int | None = None,
    ) -> None:
        self.model, self.token_of, self.end_token = model, token_of, end_token
        self.levels = max(map(len, sids))
        padded = {s + (END,) * (self.levels - len(s)) for s in map(tuple, sids)}
        self.children: dict[tuple, list[int]] = {}
        for sid in padded:
            for level in range(self.levels):
                kids = self.children.setdefault(sid[:level], [])
                if sid[level] not in kids:
                    kids.append(sid[level])
        for kids in self.children.values():
            kids.sort(key=lambda code: math.inf if code == END else code)
        self._rows: dict[tuple, torch.Tensor] = {}

    def search(
        self,
        prompt: Sequence[int],
        widths: Sequence[int],
        score: str = "vocab",
        score_k: int | None = None,
        margin: float | None = None,
        min_beams: int = 1,
    ) -> list[tuple[tuple[int, ...], float]]:
        """(SID without END, score) of the final beams, best first."""
        beams: list[tuple[tuple, float]] = [((), 0.0)]
        limit = math.inf
        for level, width in enumerate(widths):
            rows = self._logits(tuple(prompt), [prefix for prefix, _ in beams])
            found = []
            for rank, (prefix, cum) in enumerate(beams):
                if prefix and prefix[-1] == END:
                    found.append((cum, rank, END, prefix))
                    continue
                for code, logp in self._step(rows[rank], prefix, level, score, score_k or width):
                    found.append((cum + logp, rank, code, prefix))
            found.sort(key=lambda f: (-f[0], f[1], math.inf if f[2] == END else f[2]))
            kept = found[: int(min(width, limit))]
            if margin is not None and level + 1 < len(widths):
                near = sum(value >= kept[0][0] - margin for value, *_ in kept)
                kept = kept[: max(near, min(min_beams, len(kept)))]
                limit = len(kept)
            beams = [((*prefix, code), value) for value, _, code, prefix in kept]
        return [(tuple(code for code in prefix if code != END), value) for prefix, value in beams]

    def _step(
        self, logits: torch.Tensor, prefix: tuple, level: int, score: str, k: int
    ) -> list[tuple[int, float]]:
        legal = self.children.get(prefix, [])
        values = {code: float(logits[self._token(level, code)]) for code in legal}
        if score == "topk":
            order = sorted(legal, key=lambda code: (-values[code], math.inf if code == END else code))
            legal = order[:k]
        if score == "vocab":
            z = float(logits.logsumexp(0))
        elif score == "level":
            tokens = list(self.token_of[level])
            if self.end_token is not None and level > 0:
                tokens.append(self.end_token)
            z = float(logits[tokens].logsumexp(0))
        else:
            z = float(torch.tensor([values[code] for code in legal], dtype=torch.float64).logsumexp(0))
        return [(code, values[code] - z) for code in legal]

    def _token(self, level: int, code: int) -> int:
        if code == END:
            assert self.end_token is not None
            return self.end_token
        return self.token_of[level][code]

    @torch.no_grad()
    def _logits(self, prompt: tuple, prefixes: Sequence[tuple]) -> list[torch.Tensor]:
        """Float64 logits after prompt + prefix, a row per prefix; equal lengths share a forward pass."""
        keys = [prompt + tuple(self._token(i, c) for i, c in enumerate(p) if c != END) for p in prefixes]
        missing = sorted({key for key in keys if key not in self._rows}, key=len)
        for _, group in groupby(missing, key=len):
            batch = list(group)
            rows = self.model(torch.tensor(batch), logits_to_keep=1).logits[:, -1].double()
            self._rows.update(zip(batch, rows, strict=True))
        return [self._rows[key] for key in keys]
