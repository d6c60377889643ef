"""A language model of few weights with a tokenizer of letters, as transformers saves it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = 120


def save(folder: Path) -> Path:
    """Write the model; every character is a token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LETTERS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    vocab = {chr(code): code - 8 for code in range(8, 8 + LETTERS)}
    whole = Tokenizer(models.WordLevel(vocab, unk_token="~"))
    whole.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="~").save_pretrained(folder)
    return folder
