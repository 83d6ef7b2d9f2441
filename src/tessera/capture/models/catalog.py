"""The built-in models: published configurations, and tiny ones of the same make that run on a laptop.

Full-size models are in bfloat16, tiny ones in float32. Tiny vocabularies are bytes, begin and end.
"""

from typing import Any

import torch

BYTES = 258

# fmt: off
# name -> (model_type of transformers, configuration, dtype)
LANGUAGE: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "llama-3-8b": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }, torch.bfloat16),
    "tiny-llama": ("llama", {
        "vocab_size": BYTES, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    }, torch.float32),
    "gpt-oss-20b": ("gpt_oss", {
        "num_hidden_layers": 24, "num_local_experts": 32, "rms_norm_eps": 1e-5,
    }, torch.bfloat16),
    "tiny-gpt-oss": ("gpt_oss", {
        "vocab_size": BYTES, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 16, "sliding_window": 8, "max_position_embeddings": 4096,
    }, torch.float32),
    "mamba-codestral-7b": ("mamba2", {
        "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
        "state_size": 128, "n_groups": 8, "chunk_size": 256,
    }, torch.bfloat16),
    "tiny-mamba": ("mamba2", {
        "vocab_size": BYTES, "hidden_size": 128, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 32,
        "state_size": 16, "n_groups": 2, "chunk_size": 16,
    }, torch.float32),
    "qwen2.5-vl-7b": ("qwen2_5_vl", {
        "text_config": {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24],
            },
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": 3584,
        },
    }, torch.bfloat16),
    "tiny-qwen2.5-vl": ("qwen2_5_vl", {
        "text_config": {
            "vocab_size": BYTES, "bos_token_id": None, "eos_token_id": None, "hidden_size": 128,
            "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [4, 6, 6],
            },
        },
        "vision_config": {
            "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
            "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1, 3],
        },
    }, torch.float32),
}

# name -> (sizes of the denoiser, tokens of its text encoders, dtype)
DENOISERS: dict[str, tuple[dict[str, int], int, torch.dtype]] = {
    "sd3.5-medium": ({}, 333, torch.bfloat16),
    "tiny-sd3.5": ({
        "depth": 4, "heads": 4, "head_dim": 16, "text_width": 64, "pooled_width": 32, "channels": 4,
        "max_side": 64, "num_dual": 2,
    }, 16, torch.float32),
}
