"""Built-in models: published configurations in bfloat16, and tiny ones in float32 for laptops.

Tiny vocabularies are the bytes plus a begin and an end token.
"""

from typing import Any

import torch

BYTES = 258

# fmt: off
# name -> (transformers model_type, configuration, dtype)
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

# name -> (diffusers class, configuration, text tokens, dtype)
DENOISERS: dict[str, tuple[str, dict[str, Any], int, torch.dtype]] = {
    "sd3.5-medium": ("SD3Transformer2DModel", {
        "num_layers": 24, "num_attention_heads": 24, "attention_head_dim": 64, "caption_projection_dim": 1536,
        "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "in_channels": 16, "out_channels": 16,
        "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm",
    }, 333, torch.bfloat16),
    "tiny-sd3.5": ("SD3Transformer2DModel", {
        "num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 16, "caption_projection_dim": 64,
        "joint_attention_dim": 64, "pooled_projection_dim": 32, "in_channels": 4, "out_channels": 4,
        "pos_embed_max_size": 64, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm", "sample_size": 32,
    }, 16, torch.float32),
}
