"""What each operator takes and returns: the contract between the steps, the torch reference and every kernel.

Letters: B requests of the batch, W width of the bucket, K width of the next selection, N token rows, T =
levels - 1 decode steps, Hq / Hkv query / key-value heads, D head_dim, P page-table columns, V logits columns,
R pool rows. Every tensor of one call lives on one device. Index tensors are int32. Log-sum-exp values are
natural logs.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextView:
    """One layer of ContextKV as a batch of requests sees it.

    Attributes:
        k, v: [pages + 1, page_size, Hkv, D], compute dtype. The last page is scratch, for padding.
        page_table: int32 [B, P]; key j of request b is row j % page_size of page page_table[b, j //
            page_size].
        context_len: int32 [B], tokens; 0 for a padding request.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor
    context_len: Tensor


@dataclass(frozen=True, slots=True)
class BeamView:
    """One layer of BeamKV as a batch of requests sees it.

    Attributes:
        k, v: [slots + 1, T, W_max, Hkv, D], compute dtype, step-major; the last slot is scratch, for padding.
        slot: int32 [B], row of the pools that request b leases.
        ancestor: int32 [B, T, W]; beam w of request b reads row ancestor[b, s, w] of step s for every s <=
            step[b]; ancestor[b, step[b], w] == w. Entries of later steps are valid rows with no meaning.
        step: int32 [B], the decode step being computed; request b has step[b] + 1 beam keys.
    """

    k: Tensor
    v: Tensor
    slot: Tensor
    ancestor: Tensor
    step: Tensor


@dataclass(frozen=True, slots=True)
class PathView:
    """What a selection reads of BeamPath.

    Attributes:
        slot: int32 [B], row of the pools that request b leases; the last row is scratch and has width 0.
        cum: float32 [slots + 1, W_max], score of each live beam so far.
        node: int32 [slots + 1, W_max], trie node of each live beam; 0 is the root.
        width: int32 [slots + 1], live beams.
        rows: W, beams per request in the logits, W >= width[slot[b]] for every b.
    """

    slot: Tensor
    cum: Tensor
    node: Tensor
    width: Tensor
    rows: int


@dataclass(frozen=True, slots=True)
class TrieView:
    """The catalogue on the device: implicit-child CSR, nodes numbered level by level in SID order, root = 0.

    Attributes:
        first_child: int32 [inner nodes + 1]; the children of node p begin at first_child[p] and end before
            first_child[p + 1], siblings ascending by code. Inner nodes are the root and the nodes of every
            level but the last.
        code: int16 or int32 [nodes]; the bits of an unsigned code, `code & 0xFFFF` for int16. code[0] means
            nothing.
        column: int32 [levels, codes + 1], the logits column of (level, code); None where the column is the
            code itself.
        token: int32 [levels, codes + 1], token id of (level, code).
        end_code: int32 [levels], the code that ends a short SID, -1 where a level has none. A beam whose node
            carries its level's end code has one child, the next END, and that child's score is the beam's
            own.
        live: int32 [views, ceil(nodes / 32)] bit masks (bit node % 32 of word node // 32); None: every node
            is live.
        view: int32 [B], row of `live` that request b may see.
        capacity: candidates that one request can have in this call, at most; sizes every buffer.
    """

    first_child: Tensor
    code: Tensor
    column: Tensor | None
    token: Tensor
    end_code: Tensor
    live: Tensor | None
    view: Tensor | None
    capacity: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How a selection cuts, per request.

    Attributes:
        level: int32 [B], the SID level that is being chosen.
        next_width: int32 [B], beams to keep at most; 0 for a padding request.
        score_k: int32 [B], K of `topk` scores; ignored by the other score modes.
        margin: float32 [B], nats below the best beam at which a beam is dropped; inf: none is.
        min_width: int32 [B], beams that survive the margin at least.
        width: K, the bucket of the next width; K >= next_width[b] for every b.
    """

    level: Tensor
    next_width: Tensor
    score_k: Tensor
    margin: Tensor
    min_width: Tensor
    width: int

    def part(self, requests: slice) -> "Limits":
        """The limits of a part of the batch."""
        return Limits(
            level=self.level[requests],
            next_width=self.next_width[requests],
            score_k=self.score_k[requests],
            margin=self.margin[requests],
            min_width=self.min_width[requests],
            width=self.width,
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """The next beams of a batch, by score descending, parent rank ascending, code or token id ascending.

    Attributes:
        score: float32 [B, K], -inf at and past count[b].
        parent: int32 [B, K], rank of the parent beam; 0 past the count.
        token: int32 [B, K], token id that the next forward feeds; 0 past the count.
        node: int32 [B, K], trie node; 0 past the count, and everywhere without a trie.
        count: int32 [B], beams that live on.
    """

    score: Tensor
    parent: Tensor
    token: Tensor
    node: Tensor
    count: Tensor


class QkNormRopeWrite(Protocol):
    """Finish a QKV projection in place and store its keys and values."""

    def __call__(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        rows: Tensor,
        keep_k: bool,
    ) -> None:
        """Normalise and rotate q and k, then write k and v to their pool rows.

        Arithmetic is fp32 with one rounding at each store. Rotation pairs dimension i with i + D/2 (HF's
        layout).

        Args:
            qkv: [N, Hq + 2 * Hkv, D], compute dtype, contiguous; q heads first, then k, then v. The q part is
                overwritten with the rotated queries; the k part with the rotated keys if `keep_k`.
            q_norm, k_norm: [D], RMSNorm weights of Qwen3; None: no norm.
            eps: RMSNorm epsilon.
            cos_sin: float32 [positions, D], cos in the first half of a row and sin in the second.
            positions: int32 [N], row of `cos_sin`.
            k_pool, v_pool: [R, Hkv, D], one layer of ContextKV or BeamKV with its leading axes flattened.
            rows: int64 [N], pool row of each token. Padding tokens point at scratch rows.
            keep_k: Whether the caller reads rotated keys from `qkv` afterwards (prefill does, decode does
                not).
        """
        ...


class AddRmsNorm(Protocol):
    """Residual add and RMSNorm."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual) * weight, x + residual), computed in fp32 and rounded once.

        The norm is taken of the sum before that sum is rounded to the compute dtype.

        Args:
            x: [N, hidden], compute dtype.
            residual: [N, hidden] or None, which stands for zero.
            weight: [hidden].
            eps: RMSNorm epsilon.
        """
        ...


class SwiGlu(Protocol):
    """Gated activation of the MLP."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [N, F] of [N, 2 * F], gates first; computed in fp32 and rounded once."""
        ...


class PrefillAttention(Protocol):
    """Causal attention within each prompt of a packed batch."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seq_lens: tuple[int, ...], scale: float
    ) -> Tensor:
        """Return [N, Hq, D] in q's dtype.

        Args:
            q: [N, Hq, D], rows may be strided, the last axis is contiguous.
            k, v: [N, Hkv, D], likewise.
            cu_seqlens: int32 [B + 1], first row of each prompt; tokens past the last prompt are padding.
            seq_lens: Host lengths that bound the prompts: exact when run eagerly, the bucket's bound in a
                graph.
            scale: Factor on q·k.
        """
        ...


class ContextAttention(Protocol):
    """K1: every beam of a request attends to that request's shared context."""

    def __call__(self, q: Tensor, context: ContextView, width: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend to the context; each context key is read once for all beams of a request, not once a beam.

        Args:
            q: [B, W, Hq, D], compute dtype; the row stride may exceed Hq * D.
            context: Keys and values.
            width: int32 [B], live beams; rows w >= width[b] are not computed.
            scale: Factor on q·k.

        Returns:
            out: [B, W, Hq, D] float32, normalised over the context only; 0 where context_len is 0.
            lse: [B, W, Hq] float32; -inf where context_len is 0.

        Source: split-KV after Flash-Decoding (Dao et al., 2023).
        """
        ...


class BeamAttention(Protocol):
    """K2: every beam attends to its own decoded tokens."""

    def __call__(self, q: Tensor, beams: BeamView, width: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend to the step[b] + 1 keys on each beam's path; shapes as `ContextAttention`."""
        ...


class MergeAttention(Protocol):
    """K3: one softmax from two partial ones."""

    def __call__(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor) -> None:
        """Write the attention over the union of two key sets; -inf on one side, or both, is safe (both: 0).

        Args:
            out_a, out_b: [B, W, Hq, D] float32, each normalised over its own keys.
            lse_a, lse_b: [B, W, Hq] float32.
            out: [B, W, Hq, D], compute dtype; written.
        """
        ...


class DecodeAttention(Protocol):
    """The whole of a decode step's attention: K1, K2 and K3, composed or fused."""

    def __call__(
        self, q: Tensor, context: ContextView, beams: BeamView, width: Tensor, scale: float
    ) -> Tensor:
        """Return [B, W, Hq, D] in q's dtype; rows w >= width[b] hold anything."""
        ...


class RowLogSumExp(Protocol):
    """Normaliser of each row of logits."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return float32 [rows], the natural log-sum-exp of [rows, V] logits, accumulated in fp32."""
        ...


class SelectConstrained(Protocol):
    """Exact top-K over the children of the live beams."""

    def __call__(
        self, logits: Tensor, path: PathView, trie: TrieView, limits: Limits, score: str, log_z: Tensor | None
    ) -> Selection:
        """Choose the next beams of a constrained search.

        A candidate is a live child of a live beam; its score is (logit - log_z[parent]) + cum[parent] in
        fp32, in that order, with no FMA. count[b] = min(next_width[b], candidates), less what the margin
        drops.

        Args:
            logits: [B, W, V], any float dtype.
            path: Live beams.
            trie: Catalogue, filters, and the column of each code.
            limits: Widths, K and margins.
            score: `given` (log_z is the normaliser: `vocab` and `level` scores), `children` (log-sum-exp over
                a beam's legal children), `topk` (only the score_k[b] best legal logits of a beam, ties to the
                smaller code, are candidates, and log-sum-exp is over those).
            log_z: float32 [B, W] for `given`, else None.
        """
        ...


class SelectUnconstrained(Protocol):
    """Exact top-K over live beams × vocabulary."""

    def __call__(
        self, logits: Tensor, path: PathView, limits: Limits, score: str, log_z: Tensor | None
    ) -> Selection:
        """Choose the next beams of a free search; the order rule's code is the token id.

        Args:
            logits: [B, W, V], any float dtype; no fp32 copy of it is made.
            path: Live beams.
            limits: Widths, K and margins.
            score: `vocab` or `topk`, as for `SelectConstrained`.
            log_z: float32 [B, W] to score with; None: computed here (for `topk` always None).
        """
        ...


class ExtendPath(Protocol):
    """Append a selection to BeamPath."""

    def __call__(
        self,
        slot: Tensor,
        level: Tensor,
        selection: Selection,
        token: Tensor,
        ancestor: Tensor,
        cum: Tensor,
        node: Tensor,
        width: Tensor,
    ) -> None:
        """Write level[b] of every request's path, in place.

        For k < K: token[slot, level, k] = selection.token, cum and node likewise, width[slot] = count, and
        ancestor[slot, s, k] becomes parent for s == level - 1 and ancestor[slot, s, parent] for s < level -
        1. Requests whose slot is scratch (the last row) may write there, but its width stays 0.

        Args:
            slot, level: int32 [B].
            selection: What was chosen.
            token: int32 [slots + 1, levels, W_max].
            ancestor: int32 [slots + 1, T, W_max].
            cum, node, width: As in `PathView`.
        """
        ...
