"""The models of `benchmarks.coverage`: small random ones of many architectures, by class and sizes.

Sizes are those of a configuration; what is not named is as the library has it. Each is written to a folder as
its library would write it, without weights.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Model:
    """One architecture at a size that a laptop runs."""

    # model_type for transformers, empty for diffusers.
    family: str
    kind: str
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How it is called on the command line."""
        return self.family or self.kind

    @property
    def library(self) -> str:
        """Whose it is."""
        return "transformers" if self.family else "diffusers"

    def write(self, folder: Path) -> None:
        """The configuration, as a checkpoint has it."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.family:
            from transformers import AutoConfig

            config = AutoConfig.for_model(self.family, **self.sizes)
            config.architectures = [self.kind]
            config.save_pretrained(folder)
        else:
            text = json.dumps({"_class_name": self.kind, **self.sizes})
            (folder / "config.json").write_text(text, encoding="utf-8")


_WORDS = {
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BLOCKS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = {**_WORDS, **_BLOCKS}
_TEXT = {**_ENCODER, "num_key_value_heads": 2}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_GPT = {**_WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_PAIR = {
    **_WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}
_T5 = {
    **_WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_IMAGE = {**_BLOCKS, "image_size": 32, "patch_size": 8}
_SOUND = {
    **_ENCODER,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_MLA = {
    **_TEXT,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
_MAMBA = {**_WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "conv_kernel": 4}
_TWO = {"projection_dim": 16}
_SEEN = {**_TWO, "text_config": _ENCODER, "vision_config": _IMAGE}


def _causal(family: str, kind: str, **more: Any) -> Model:
    return Model(family, f"{kind}ForCausalLM", {**_TEXT, **more})


CAUSAL = (
    _causal("llama", "Llama"),
    Model("gpt2", "GPT2LMHeadModel", _GPT),
    Model("opt", "OPTForCausalLM", {**_WORDS, **_BLOCKS, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    Model("falcon", "FalconForCausalLM", {**_ENCODER, "num_kv_heads": 4}),
    Model("gpt_neox", "GPTNeoXForCausalLM", _ENCODER),
    Model("gptj", "GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    Model(
        "gpt_neo",
        "GPTNeoForCausalLM",
        {
            **_WORDS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    Model("bloom", "BloomForCausalLM", {**_WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Model(
        "mpt",
        "MptForCausalLM",
        {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    ),
    Model("gpt_bigcode", "GPTBigCodeForCausalLM", _GPT),
    Model("codegen", "CodeGenForCausalLM", {**_GPT, "rotary_dim": 4}),
    Model("biogpt", "BioGptForCausalLM", _ENCODER),
    Model(
        "xglm",
        "XGLMForCausalLM",
        {**_WORDS, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    ),
    _causal("phi", "Phi"),
    _causal("phi3", "Phi3", original_max_position_embeddings=128),
    _causal("gemma", "Gemma", head_dim=8),
    _causal("gemma2", "Gemma2", head_dim=8, sliding_window=8),
    _causal("gemma3_text", "Gemma3", head_dim=8, sliding_window=8),
    _causal("qwen2", "Qwen2"),
    _causal("qwen3", "Qwen3", head_dim=8),
    _causal("qwen2_moe", "Qwen2Moe", **_EXPERTS, shared_expert_intermediate_size=16),
    _causal("qwen3_moe", "Qwen3Moe", **_EXPERTS, head_dim=8),
    _causal(
        "qwen3_next",
        "Qwen3Next",
        **_EXPERTS,
        head_dim=8,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    _causal("mistral", "Mistral", sliding_window=8),
    _causal("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    _causal("gpt_oss", "GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    _causal("olmo", "Olmo"),
    _causal("olmo2", "Olmo2"),
    _causal("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _causal("starcoder2", "Starcoder2"),
    _causal("stablelm", "StableLm"),
    _causal("cohere", "Cohere"),
    _causal("cohere2", "Cohere2", sliding_window=8),
    _causal("deepseek_v2", "DeepseekV2", **{**_MLA, "topk_method": "greedy"}),
    _causal("deepseek_v3", "DeepseekV3", **_MLA),
    _causal("glm", "Glm", head_dim=8),
    _causal("glm4", "Glm4", head_dim=8),
    _causal("granite", "Granite"),
    _causal("granitemoe", "GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    _causal("nemotron", "Nemotron"),
    _causal("smollm3", "SmolLM3"),
    _causal("lfm2", "Lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    Model("mamba", "MambaForCausalLM", _MAMBA),
    Model(
        "mamba2",
        "Mamba2ForCausalLM",
        {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
    Model("falcon_mamba", "FalconMambaForCausalLM", _MAMBA),
    _causal(
        "jamba",
        "Jamba",
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
    ),
    _causal(
        "bamba",
        "Bamba",
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
        attn_layer_indices=[1],
    ),
    _causal("recurrent_gemma", "RecurrentGemma", lru_width=32, attention_window_size=8, num_hidden_layers=3),
    Model(
        "rwkv",
        "RwkvForCausalLM",
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
    ),
)

PAIRS = (
    Model("t5", "T5ForConditionalGeneration", _T5),
    Model("mt5", "MT5ForConditionalGeneration", _T5),
    Model("bart", "BartForConditionalGeneration", _PAIR),
    Model("pegasus", "PegasusForConditionalGeneration", _PAIR),
    Model("m2m_100", "M2M100ForConditionalGeneration", _PAIR),
    Model(
        "whisper",
        "WhisperForConditionalGeneration",
        {**_PAIR, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 128},
    ),
)

ENCODERS = (
    Model("bert", "BertForMaskedLM", _ENCODER),
    Model("roberta", "RobertaForMaskedLM", _ENCODER),
    Model(
        "distilbert",
        "DistilBertForMaskedLM",
        {**_WORDS, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    ),
    Model("albert", "AlbertForMaskedLM", {**_ENCODER, "embedding_size": 16}),
    Model("electra", "ElectraForPreTraining", {**_ENCODER, "embedding_size": 16}),
    Model("deberta-v2", "DebertaV2ForMaskedLM", _ENCODER),
    Model("mpnet", "MPNetForMaskedLM", _ENCODER),
    Model("modernbert", "ModernBertForMaskedLM", {**_ENCODER, "local_attention": 8}),
    Model("vit", "ViTForImageClassification", _IMAGE),
    Model("deit", "DeiTForImageClassification", _IMAGE),
    Model("beit", "BeitForImageClassification", _IMAGE),
    Model("dinov2", "Dinov2ForImageClassification", _IMAGE),
    Model(
        "swin",
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    ),
    Model(
        "convnext",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32},
    ),
    Model(
        "resnet",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "image_size": 32},
    ),
    Model(
        "segformer",
        "SegformerForSemanticSegmentation",
        {
            "image_size": 32,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    Model("clip", "CLIPModel", _SEEN),
    Model("siglip", "SiglipModel", _SEEN),
    Model("wav2vec2", "Wav2Vec2ForCTC", _SOUND),
    Model("hubert", "HubertForCTC", _SOUND),
    Model(
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        {**_BLOCKS, "max_length": 32, "num_mel_bins": 16},
    ),
)

_PICTURE_TOKEN = 90
_EYES = {"model_type": "clip_vision_model", **_IMAGE, "projection_dim": 16}
_QWEN_EYES = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
    "patch_size": 4,
    "window_size": 16,
}
_QWEN_TEXT = {**_TEXT, "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}}
_QWEN_WORDS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}

SEEING = (
    Model(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": _QWEN_TEXT, "vision_config": _QWEN_EYES, **_QWEN_WORDS},
    ),
    Model(
        "llava",
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": _EYES,
            "image_token_index": _PICTURE_TOKEN,
            "image_seq_length": 16,
        },
    ),
    Model(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma", **_TEXT, "head_dim": 8},
            "vision_config": {"model_type": "siglip_vision_model", **_IMAGE, "projection_dim": 32},
            "image_token_index": _PICTURE_TOKEN,
            "projection_dim": 32,
        },
    ),
)

_DIT = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "sample_size": 8,
    "patch_size": 2,
}
_UNET = {
    "sample_size": 8,
    "block_out_channels": [16, 32],
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
_VIDEO = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
}

DIFFUSION = (
    Model(
        "",
        "SD3Transformer2DModel",
        {
            **_DIT,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 16,
        },
    ),
    Model(
        "",
        "FluxTransformer2DModel",
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 16,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 16,
            "guidance_embeds": True,
            "axes_dims_rope": [4, 4, 8],
        },
    ),
    Model(
        "",
        "PixArtTransformer2DModel",
        {**_DIT, "in_channels": 4, "out_channels": 8, "caption_channels": 32, "cross_attention_dim": 32},
    ),
    Model("", "DiTTransformer2DModel", {**_DIT, "in_channels": 4, "num_embeds_ada_norm": 10}),
    Model(
        "",
        "UNet2DConditionModel",
        {
            **_UNET,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
            "attention_head_dim": [2, 4],
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "transformer_layers_per_block": [1, 2],
            "projection_class_embeddings_input_dim": 64,
            "cross_attention_dim": 32,
        },
    ),
    Model(
        "",
        "UNet2DModel",
        {
            **_UNET,
            "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        },
    ),
    Model("", "WanTransformer3DModel", {**_VIDEO, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64}),
    Model(
        "",
        "LTXVideoTransformer3DModel",
        {**_VIDEO, "cross_attention_dim": 32, "caption_channels": 32},
    ),
    Model(
        "",
        "CogVideoXTransformer3DModel",
        {
            **_VIDEO,
            "time_embed_dim": 16,
            "text_embed_dim": 32,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 8,
        },
    ),
    Model(
        "",
        "SanaTransformer2DModel",
        {
            **_DIT,
            "patch_size": 1,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 32,
        },
    ),
    Model(
        "",
        "QwenImageTransformer2DModel",
        {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 16,
            "out_channels": 4,
            "joint_attention_dim": 32,
            "axes_dims_rope": [4, 6, 6],
        },
    ),
)

MODELS = (*CAUSAL, *PAIRS, *ENCODERS, *SEEING, *DIFFUSION)
# A few that are unlike, for the tests.
SHORT = ("gpt2", "deepseek_v3", "jamba", "t5", "clip", "SD3Transformer2DModel")
