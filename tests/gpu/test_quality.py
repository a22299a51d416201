"""bfloat16 answers on Qwen3-0.6B shapes, judged against float32 and transformers in bfloat16.

Rounding alone moves one or two per cent of the tail of a 900-beam result, so the yardstick is transformers'
own bfloat16 search over the same catalogue, weights and prompts.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen3ForCausalLM

from grinf import Engine, EngineOptions, Request, Trie
from grinf.jobs.catalogue import skewed_catalogue
from grinf.model.config import read_config
from grinf.model.weights import load_weights
from grinf.trie import TokenMapping, trie_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ARCHITECTURE = Path("bench_configs/models/qwen3-0.6b.json")
WIDTH, CODEBOOK = 900, 8192
ITEMS = 1_000_000


def make_trie(levels: int, vocab: int) -> Trie:
    ids, codes = skewed_catalogue(ITEMS)
    if levels > 3:
        extra = np.random.default_rng(1).integers(0, CODEBOOK, (len(codes), levels - 3), dtype=np.int32)
        codes = np.concatenate([codes, extra], axis=1)
    bases = [vocab - (levels - level) * CODEBOOK for level in range(levels)]
    sizes = [CODEBOOK] * levels
    return trie_of(codes, ids, codebook_sizes=sizes).with_tokens(TokenMapping.from_bases(bases, sizes))


def transformers_model(dtype: torch.dtype) -> Qwen3ForCausalLM:
    """The same weights in transformers, unfused."""
    config = read_config(ARCHITECTURE)
    weights = load_weights(ARCHITECTURE, config, torch.bfloat16, torch.device("cuda"), seed=0)
    names = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    q_rows, kv_rows = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        q, k, v = layer.qkv.split([q_rows, kv_rows, kv_rows])
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o,
        }
        parts |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down}
        parts |= {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm}
        parts |= {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}
        names |= {f"{prefix}{name}.weight": tensor for name, tensor in parts.items()}
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(AutoConfig.from_pretrained(ARCHITECTURE)).to(dtype)
    missing, unexpected = model.load_state_dict(names, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def log_probs(model: Qwen3ForCausalLM, prompt: np.ndarray, suffixes: np.ndarray) -> torch.Tensor:
    """Float32 log-probabilities after prompt + each suffix [n, depth], by teacher forcing."""
    ids, tails = (torch.from_numpy(a.astype(np.int64)).to(model.device) for a in (prompt[None], suffixes))
    start = model(ids, use_cache=True, logits_to_keep=1)
    if not suffixes.shape[1]:
        return start.logits[:, -1].float().log_softmax(-1).expand(len(suffixes), -1)
    outs = []
    for part in tails.split(max(1, 100_000 // len(prompt))):
        cache = copy.deepcopy(start.past_key_values)
        cache.batch_repeat_interleave(len(part))
        outs.append(
            model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1].float().log_softmax(-1)
        )
    return torch.cat(outs)


def plain_search(model: Qwen3ForCausalLM, trie: Trie, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Beam search over the catalogue with nothing shared and nothing fused: (leaves, scores), best first."""
    assert trie.token_ids is not None
    node, cum = np.zeros(1, np.int64), torch.zeros(1, device="cuda")
    tokens = np.zeros((1, 0), np.int64)
    for level in range(trie.levels):
        logp = log_probs(model, prompt, tokens)
        first = trie.child_ptr[level - 1][node].astype(np.int64) if level else np.zeros(1, np.int64)
        end = trie.child_ptr[level - 1][node + 1].astype(np.int64) if level else np.array([trie.num_nodes[0]])
        parent = np.repeat(np.arange(len(node)), end - first)
        child = np.concatenate([np.arange(a, b) for a, b in zip(first, end, strict=True)])
        token = trie.token_ids[level][trie.codes[level][child]]
        at = torch.from_numpy(parent).cuda()
        score = cum[at] + logp[at, torch.from_numpy(token.astype(np.int64)).cuda()]
        best = score.topk(min(WIDTH, len(child)))
        keep = best.indices.cpu().numpy()
        cum, node = best.values, child[keep]
        tokens = np.concatenate([tokens[parent[keep]], token[keep, None]], axis=1)
    return node, cum.cpu().numpy()


def forced_scores(model: Qwen3ForCausalLM, trie: Trie, prompt: np.ndarray, sids: np.ndarray) -> np.ndarray:
    """Score of each SID by teacher forcing."""
    assert trie.token_ids is not None
    tokens = np.stack([trie.token_ids[level][sids[:, level]] for level in range(trie.levels)], axis=1)
    total = np.zeros(len(sids))
    for level in range(trie.levels):
        logp = log_probs(model, prompt, tokens[:, :level])
        total += logp[np.arange(len(sids)), tokens[:, level]].double().cpu().numpy()
    return total


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    return len(set(one.tolist()) & set(other.tolist())) / len(other)


@pytest.mark.parametrize(("levels", "lengths"), [(3, (100, 100)), (3, (500,)), (3, (1000,)), (5, (100,))])
def test_bfloat16_is_as_good_as_transformers(levels: int, lengths: Sequence[int]) -> None:
    vocab = read_config(ARCHITECTURE).vocab_rows
    trie = make_trie(levels, vocab)
    rng = np.random.default_rng(levels)
    prompts = [rng.integers(0, vocab - levels * CODEBOOK, n, dtype=np.int32) for n in lengths]
    options = EngineOptions(
        str(ARCHITECTURE),
        device="cuda:0",
        dtype="bfloat16",
        beams=(WIDTH,),
        max_batch=4,
        max_context=max(lengths),
    )
    with Engine.load(options, trie) as engine:
        answers = sorted(engine.run(Request(i, p) for i, p in enumerate(prompts)), key=lambda r: r.request_id)
    torch.cuda.empty_cache()
    in_fp32, in_bf16 = transformers_model(torch.float32), transformers_model(torch.bfloat16)
    ours, theirs, top1 = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.leaves is not None
        assert answer.beams_returned == WIDTH
        assert (trie.leaf_of(answer.sids) == answer.leaves).all()
        assert len(np.unique(answer.leaves)) == WIDTH
        assert (np.diff(answer.scores) <= 0).all()
        forced = forced_scores(in_fp32, trie, prompt, answer.sids)
        worst = np.abs(forced - answer.scores).max()
        leaves, _ = plain_search(in_fp32, trie, prompt)
        bf16_leaves, bf16_scores = plain_search(in_bf16, trie, prompt)
        theirs_worst = np.abs(
            forced_scores(in_fp32, trie, prompt, trie.sids(bf16_leaves)) - bf16_scores
        ).max()
        assert worst <= max(0.05, 2 * theirs_worst)
        ours.append(overlap(answer.leaves, leaves))
        theirs.append(overlap(bf16_leaves, leaves))
        top1.append("equal" if answer.leaves[0] == leaves[0] else "differs")
        print(
            f"levels {levels} length {len(prompt)}: overlap {ours[-1]:.4f} (transformers {theirs[-1]:.4f}), "
            f"score error {worst:.4f} (transformers {theirs_worst:.4f}), top-1 {top1[-1]}"
        )
    assert np.mean(ours) >= np.mean(theirs) - 0.01


def test_a_context_of_5000_tokens_is_scored_right() -> None:
    """Too long for a plain search of 900 beams: some scores against float32 teacher forcing."""
    vocab = read_config(ARCHITECTURE).vocab_rows
    trie = make_trie(3, vocab)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, vocab - 3 * CODEBOOK, n, dtype=np.int32) for n in (5000, 4999)]
    options = EngineOptions(str(ARCHITECTURE), device="cuda:0", beams=(WIDTH,), max_batch=2, max_context=5000)
    with Engine.load(options, trie) as engine:
        answers = sorted(engine.run(Request(i, p) for i, p in enumerate(prompts)), key=lambda r: r.request_id)
    torch.cuda.empty_cache()
    model = transformers_model(torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.beams_returned == WIDTH
        assert (trie.leaf_of(answer.sids) == answer.leaves).all()
        some = np.linspace(0, WIDTH - 1, 8).astype(int)
        error = np.abs(forced_scores(model, trie, prompt, answer.sids[some]) - answer.scores[some]).max()
        print(f"length {len(prompt)}: score error {error:.4f}")
        assert error <= 0.1
