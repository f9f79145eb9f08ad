"""What a tiny config needs that no rule gives: attributes by model type or class, `"part."` for those of a part, and
`"generation."` for what is set in the generation config."""

from __future__ import annotations

from typing import Any

_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"

_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_DOTS3 = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
    "num_key_value_heads": 4,
    "num_attention_heads": 4,
    "n_group": 1,
}
_GEMMA3N = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
    "activation_sparsity_pattern": [0.0] * 6,
    "intermediate_size": [96] * 6,
}
_ONE_TILE = {"image_grid_pinpoints": [[56, 56]]}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}

_CODEC = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_CODEBOOKS = {
    "decoder.": {"pad_token_id": 256, "bos_token_id": 256},
    "generation.": {
        "pad_token_id": 256,
        "bos_token_id": 256,
        "decoder_start_token_id": 256,
        "guidance_scale": 1.0,
        "num_return_sequences": 1,
    },
}
"""Padding lies above the vocabulary, for all that is generated of it is cut out."""

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "vision_config.": {"codebook_size": 16},
        "audio_config.": {"codebook_size": 16, "codebook_dim": 64},
        "image_token_offset": 210,
        "audio_token_offset": 226,
    },
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_d_head": "auto"},
    "blip-2": {"image_token_index": 200},
    "blt": {
        "num_hidden_layers": 2,
        "local_attention_window_len": 8,
        "encoder_hash_byte_group_vocab": 500,
        "encoder_hash_byte_group_size": [3, 4],
    },
    "cohere_compass": {"text_config.": {"rope_parameters": {_FULL: _SECTIONS, _SLIDING: _SECTIONS}}},
    "cohere_compass_text": {"rope_parameters": {_FULL: _SECTIONS, _SLIDING: _SECTIONS}},
    "chameleon": {"vocabulary_map": {"<image>": 200}, "image_token_id": 200},
    "dbrx": {"attn_config.": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config.": {"mlp_layer_types": ["dense", "sparse"]}},
    "dia": {"decoder_config.": {"eos_token_id": 255}},
    "diffusion_gemma": {
        "text_config.": {
            "global_head_dim": 16,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 96,
            "rope_parameters": {
                _FULL: {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
                _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        }
    },
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "emu3": {"vocabulary_map": {"<image>": 200}, "image_token_id": 200},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "fast_vlm": {"vision_config.": {"hidden_size": 64}},
    "florence2": {
        "vision_config.": {"embed_dim": (32, 32, 32, 32), "num_heads": (2,) * 4, "num_groups": (2,) * 4},
    },
    "fun_asr_nano": {"adaptor_config.": {"intermediate_size": 16}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "dots3_note": {
        "text_config.": _DOTS3,
        "vision_config.": {
            "num_hidden_layers": 2,
            "mlp_layer_types": ["dense"] * 2,
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
        },
        "audio_config.": {"adapter_out_dim": 64, "adapter_input_size": 64},
    },
    "dots3_note_text": _DOTS3,
    "ernie4_5_vl_moe": {"text_config.": {"rope_parameters": _SECTIONS | {"mrope_section": [3, 3, 2]}}},
    "gemma3n": {"text_config.": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4_assistant": {
        "__init__": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
        "text_config.": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    },
    "gemma4_unified_assistant": {"text_config.": {"num_kv_shared_layers": 0}},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
    },
    "glm5_next": {"text_config.": {"index_kpool": 4}},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": [_LINEAR, _FULL] * 2, "mamba_d_head": "auto"},
    "instructblip": {"image_token_index": 200},
    "instructblipvideo": {"video_token_index": 200},
    "internvl": {"vision_config.": {"image_size": [56, 56]}},
    "kyutai_speech_to_text": {
        "codec_config.": {"upsampling_ratios": [2, 2], "upsample_groups": 64, "codebook_size": 128},
    },
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [2]},
    "lfm2_vl": {"text_config.": {"num_hidden_layers": 4, "full_attn_idxs": [2]}},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", _FULL, "conv"]},
    "llava_next": _ONE_TILE,
    "llava_next_video": _ONE_TILE,
    "llava_onevision": _ONE_TILE,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "partial_rotary_factor": 0.5,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "molmo2": {"adapter_config.": {"vision_feature_layer": [-1]}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
    "nemotron_h_omni": {"vision_config.": {"video_temporal_patch_size": 2}},
    "qwen4_exp": {
        "text_config.": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        }
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "paddleocr_vl": {"text_config.": {"rope_parameters": _SECTIONS}},
    "perception_lm": {"vision_config.": {"model_args": {"embed_dim": 64}}},
    "pop2piano": {"generation.": {"composer_to_feature_token": {f"composer{i}": i for i in range(1, 22)}}},
    "pp_formulanet": {
        "vision_config.": {"post_conv_in_channels": 32, "post_conv_mid_channels": 32, "post_conv_out_channels": 64},
    },
    "qianfan_ocr": {"vision_config.": {"image_size": [56, 56]}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 230},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 230},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16]},
    "step3p7": {"text_config.": {"sliding_window": 8}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "vibevoice": {"audio_config.": _CODEC, "semantic_model_config.": _CODEC},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config.": _CODEC, "semantic_tokenizer_encoder_config.": _CODEC},
    "xlm": {"emb_dim": 64},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "num_hidden_layers": 4, "layers_block_type": [_LINEAR, "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": [_LINEAR, "hybrid"] * 2},
}

COMPOSED: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "encoder-decoder": {
        "encoder": ("bert", {}),
        "decoder": ("bert", {"is_decoder": True, "add_cross_attention": True}),
    },
    "vision-encoder-decoder": {
        "encoder": ("vit", {}),
        "decoder": ("gpt2", {"is_decoder": True, "add_cross_attention": True}),
    },
    "speech-encoder-decoder": {
        "encoder": ("wav2vec2", {"conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2)}),
        "decoder": ("bert", {"is_decoder": True, "add_cross_attention": True}),
    },
}
"""Types whose config is put together from two others: the type and attributes of each part."""
