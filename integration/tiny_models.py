"""Write tiny models: random ones that start fast and split in two, and ones that must be refused.

Their tokens are bare numbers: start the engine with ``skip_tokenizer_init=True`` and ask with
``input_ids``.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 512
LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Layers in turn with a window of 16 tokens and without, soft-capped logits, a scale of its own, and
# two heads that share each KV head.
GEMMA2: dict[str, object] = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 48,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
# Attention sinks, and a window in two of three layers; the engine would give those a pool apart.
GRANITE_SWA: dict[str, object] = LLAMA | {
    "architectures": ["GraniteSWAForCausalLM"],
    "model_type": "granite_swa",
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 16,
    "attention_multiplier": 0.1,
}
# The same with experts, whose weights the engine loads for its GPU kernels alone.
GPT_OSS: dict[str, object] = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_bias": True,
}
# Multi-head latent attention: keys and values exist only as one compressed row per token.
LATENT: dict[str, object] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
ENCODER_DECODER: dict[str, object] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 80,
    "is_encoder_decoder": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 3,
}


# Short convolutions in the place of attention in two layers of three.
LFM2: dict[str, object] = LLAMA | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
}
# Linear attention in one layer of two.
QWEN3_NEXT: dict[str, object] = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "num_experts": 0,
}


def write_config(out: Path, config: dict[str, object], **changes: object) -> Path:
    """Write the configuration of a model without weights; returns its directory."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config | changes, indent=1))
    return out


def write_model(
    out: Path,
    base: dict[str, object] = LLAMA,
    seed: int = 0,
    sink_logit: float = 2.5,
    **changes: object,
) -> Path:
    """Write a random model with its weights; returns its directory.

    ``sink_logit`` is the mean of its attention sinks: 2.5 is the sum of some ten tokens.

    Real weights, not the engine's dummy ones: those differ between one rank and two.
    """
    import torch
    import transformers

    write_config(out, base, **changes)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:  # wide enough that attention decides the next token
                weight.normal_(0, weight.shape[1] ** -0.5)
            elif name.endswith("sinks"):
                weight.normal_(sink_logit, 1.0)
    model.save_pretrained(out)
    return write_config(out, base, **changes)


def write_adapter(
    out: Path, model: Path, seed: int = 0, rank: int = 8, strength: float = 0.3
) -> Path:
    """Write a random LoRA adapter of a model's attention, as PEFT does; returns its directory.

    ``strength`` is the size of its change of a projection, relative to the projection.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a, b = torch.randn(rank, columns), torch.randn(rows, rank)
            tensors[f"{place}.lora_A.weight"] = (a * columns**-0.5).bfloat16()
            tensors[f"{place}.lora_B.weight"] = (b * strength * rank**-0.5).bfloat16()
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(shapes)}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(json.dumps(facts))
    return out
