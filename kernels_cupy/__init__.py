"""CUDA kernels of grinf, compiled at run time by CuPy: a kernel is `x.cu` and its binding `x.py`."""

STEMS = (
    "context_attention",
    "decode_attention_sm90",
    "prefill_attention_sm90",
    "beam_attention",
    "merge_attention",
    "constrained_topk",
    "vocab_topk",
    "elementwise",
    "path",
)
