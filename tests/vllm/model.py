"""A tiny Qwen3 with random weights of a fixed seed, and a tokenizer of single bytes."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS = 256, 257


def tokenizer():
    names = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    names.update({"<pad>": PAD, "<eos>": EOS})
    made = Tokenizer(models.BPE(vocab=names, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def make(folder):
    """Writes the model, 5 MB. Its greedy tokens depend on the whole context."""
    tokenizer().save_pretrained(folder)
    torch.manual_seed(1234)
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        tie_word_embeddings=False, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None)
    model = Qwen3ForCausalLM(config)
    # Wide weights: the best token is far ahead of the second, so rounding changes nothing.
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.08)
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
