"""KV caches of real models, as what one request moves: groups of regions (a region is one layer's
tensor) with the bytes of a page and the pages that a request of so many tokens takes.

Where the numbers are from, each read in November 2026:

DSV4      DeepSeek-V4-Pro as vLLM lays it out, the workload of the CollectiveX kv-transfer suite:
          30 layers with an entry of 576 bytes for 4 tokens and an index entry of 132 bytes beside
          it, 31 layers with an entry of 576 bytes for 128 tokens, and a window of the last 128
          tokens, 576 bytes each, on all 61 layers; pages of 16 and 64 tokens, 8k to 512k tokens,
          bursts of 1 to 64 requests.
          https://github.com/SemiAnalysisAI/InferenceX/pull/2510
          https://github.com/SemiAnalysisAI/InferenceX, experimental/CollectiveX/bench/
          kv_workload.py at ddf959a4 and configs/kv_sweep.json at 17aae5cf
MLA704    the suite's first form of it: 61 layers of 704 elements of one byte a token.
          kv_workload.py at 5096f243
GQA94     the same, Qwen3-235B: 94 layers of 1024 elements of one byte a token. As above
DSV3      DeepSeek-V3: 61 layers, kv_lora_rank 512 + qk_rope_head_dim 64, two bytes each.
          https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
LLAMA70B  80 layers, 8 KV heads of 128 elements, two bytes each; K and V are regions of their own.
          https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json
LLAMA8B   the same with 32 layers.
          https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
"""

import math

# name -> [(regions, bytes of an entry, tokens of an entry, tokens that are kept at most)]
MODELS = {
    "DSV4": [(30, 576, 4, None), (30, 132, 4, None), (31, 576, 128, None), (61, 576, 1, 128)],
    "MLA704": [(61, 704, 1, None)],
    "GQA94": [(94, 1024, 1, None)],
    "DSV3": [(61, (512 + 64) * 2, 1, None)],
    "LLAMA70B": [(2 * 80, 8 * 128 * 2, 1, None)],
    "LLAMA8B": [(2 * 32, 8 * 128 * 2, 1, None)],
}

# model, tokens of a request, tokens of a page, requests at a time
SHAPES = [
    ("DSV4", 8_192, 16, 1),
    ("DSV4", 8_192, 64, 1),
    ("DSV4", 8_192, 64, 8),
    ("DSV4", 8_192, 64, 64),
    ("DSV4", 32_768, 64, 1),
    ("DSV4", 131_072, 64, 1),
    ("DSV4", 131_072, 16, 1),
    ("DSV4", 524_288, 64, 1),
    ("DSV4", 524_288, 16, 1),
    ("MLA704", 8_192, 16, 1),
    ("MLA704", 131_072, 64, 1),
    ("GQA94", 8_192, 16, 1),
    ("DSV3", 8_192, 16, 1),
    ("DSV3", 8_192, 64, 1),
    ("LLAMA70B", 8_192, 16, 1),
    ("LLAMA70B", 1_024, 16, 16),
    ("LLAMA8B", 8_192, 16, 1),
    ("LLAMA8B", 1_024, 16, 64),
]


def groups(model, tokens, page):
    """[(regions, bytes of a page, pages)]: an entry of more tokens than a page fills a page."""
    out = []
    for regions, entry, each, most in MODELS[model]:
        kept = min(tokens, most) if most else tokens
        entries = max(1, page // each)
        out.append((regions, entries * entry, math.ceil(math.ceil(kept / each) / entries)))
    return out


def title(model, tokens, page, requests):
    return f"{model} {tokens // 1024}k/{page} x{requests}"
