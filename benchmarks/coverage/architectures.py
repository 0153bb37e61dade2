"""Architectures of transformers with small random configs, in train mode, with labels. Nothing is downloaded.

Sizes are set by the names that configs share; what a model needs besides stands in `OWN`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TIME, VOCABULARY, IMAGE = 6, 16, 96, 32
Batch = dict[str, Tensor]
Case = tuple[nn.Module, Batch]

# A size for every name that a config may have. Heads, widths and experts divide by 2; nothing is 1.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "word_embed_proj_dim", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim"), 64),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    "num_key_value_heads": 2, "d_kv": 8, "head_dim": 8, "vocab_size": VOCABULARY, "embedding_size": 16,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "image_size": IMAGE, "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

LAYERS = {"num_hidden_layers": 2}
# What the sizes above do not say, by model type.
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
          "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
STARTS = {"decoder_start_token_id": 1}
TWO_STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 16}
WINDOWS = {"depths": [1, 2], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4}
WAVES = {"conv_dim": [16, 16, 16], "conv_stride": [5, 4, 2], "conv_kernel": [10, 4, 2], "num_feat_extract_layers": 3,
         "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
         "classifier_proj_size": 16}  # fmt: skip
GEMMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "layer_types": ["sliding_attention", "full_attention"],
}
TEXT_AND_IMAGE = {
    "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "eos_token_id": 2, "projection_size": 32},
    "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                      "image_size": IMAGE, "patch_size": 8},
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 8,
              "use_mamba_kernels": False},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "attn_layer_indices": [1],
              "mamba_chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "head_dim": 4},
    "minicpm3": {key: LATENT[key] for key in list(LATENT)[:6]},
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{kind: {"attention_type": "original_full"} for kind in ("big_bird", "bigbird_pegasus")},
    "longformer": {"attention_window": 8}, "led": {"attention_window": 8},
    "squeezebert": {"embedding_size": 32},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 16},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "t5gemma": {**dict.fromkeys(("encoder", "decoder"), GEMMA), **STARTS},
    "swin": WINDOWS, "swinv2": {**WINDOWS, "embed_dim": 48, "pretrained_window_sizes": [0, 0]}, "donut-swin": WINDOWS,
    "convnext": {**TWO_STAGES, "num_stages": 2}, "convnextv2": {**TWO_STAGES, "num_stages": 2},
    "resnet": TWO_STAGES, "regnet": {**TWO_STAGES, "groups_width": 8}, "bit": {**TWO_STAGES, "num_groups": 4},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilenet_v1": {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.1},  # that of 0.999 leaves but rounding
    "poolformer": {"depths": [1, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2],
                   "padding": [2, 1], "num_encoder_blocks": 2},
    "pvt": {"depths": [1, 1], "hidden_sizes": [16, 32], "patch_sizes": [4, 2], "strides": [4, 2], "mlp_ratios": [2, 2],
            "num_attention_heads": [2, 4], "sequence_reduction_ratios": [2, 1], "num_encoder_blocks": 2},
    "pvt_v2": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 32], "num_attention_heads": [2, 4, 4, 4]},
    "segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 32], "num_attention_heads": [2, 4, 4, 4],
                  "decoder_hidden_size": 32},
    "focalnet": {"embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "focal_levels": [2, 2],
                 "focal_windows": [3, 3]},
    "siglip": TEXT_AND_IMAGE, "clip": {**TEXT_AND_IMAGE, "projection_dim": 32},
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm", "sew", "data2vec-audio",
                     "wav2vec2-conformer"), WAVES),
    "sew-d": {**WAVES, "position_buckets": 8, "max_position_embeddings": 16},
    "whisper": {"max_source_positions": 32, "max_target_positions": 32},
    "speech_to_text": {"max_source_positions": 64, "max_target_positions": 32},
    "xmod": {"default_language": "en_XX"},
    "t5": STARTS, "mt5": STARTS, "umt5": STARTS, "longt5": STARTS,
    # By its own numbers of 12 layers none of 2 would have experts. Of 16 tokens some are too many for theirs.
    "switch_transformers": {**STARTS, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4,
                            "expert_capacity": 5},
}  # fmt: skip


def config_of(kind: str, **more: Any) -> Any:
    """The config of a model type with small sizes."""
    from transformers import CONFIG_MAPPING

    make = CONFIG_MAPPING[kind]
    default = make()
    names = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    sizes = {
        name: size for name, size in SIZES.items()
        if name in names and isinstance(getattr(default, name, None), (int, float, type(None)))
    }  # fmt: skip
    return make(**{**sizes, **OWN.get(kind, {}), **more})


def tokens(rows: int = BATCH, time: int = TIME, low: int = 3, high: int = VOCABULARY) -> Tensor:
    return torch.randint(low, high, (rows, time))


def labels_like(ids: Tensor) -> Tensor:
    """The tokens themselves, some ignored, unevenly over the batch."""
    labels = ids.clone()
    for row in range(len(ids)):
        labels[row, : row % 4] = -100
    return labels


def padding_mask(ids: Tensor) -> Tensor:
    """The last tokens of some rows are padding."""
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        if row % 3:
            mask[row, -(row % 3) :] = 0
    return mask


def causal_lm() -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": labels_like(ids)}


def masked_lm() -> Batch:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": padding_mask(ids), "labels": labels_like(ids)}


def seq2seq() -> Batch:
    ids, target = tokens(), tokens(time=12)
    return {"input_ids": ids, "attention_mask": padding_mask(ids), "labels": labels_like(target)}


def images() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE), "labels": torch.randint(0, 2, (BATCH,))}


def segmentation() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE), "labels": torch.randint(0, 2, (BATCH, IMAGE, IMAGE))}


def waves() -> Batch:
    return {"input_values": torch.randn(BATCH, 800), "labels": torch.randint(0, 2, (BATCH,))}


def spectrogram(bins: int = 80, time: int = 64) -> Batch:
    return {"input_features": torch.randn(BATCH, bins, time), "labels": tokens(time=12)}


def speech(bins: int = 80, time: int = 64) -> Batch:
    return {"input_features": torch.randn(BATCH, time, bins), "labels": tokens(time=12)}


def pairs() -> Batch:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": padding_mask(ids), "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE),
            "return_loss": True}  # type: ignore[dict-item] # fmt: skip


def classes() -> Batch:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": padding_mask(ids), "labels": torch.randint(0, 2, (BATCH,))}


# By task: the auto class of transformers, the batch, and the model types.
TASKS: dict[str, tuple[str, Callable[[], Batch], str]] = {
    "causal": ("AutoModelForCausalLM", causal_lm, """
        llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neo gpt_neox
        gptj gpt_bigcode opt bloom mpt falcon codegen stablelm starcoder2 olmo olmo2 olmo3 olmoe cohere cohere2 granite
        granitemoe glm glm4 persimmon nemotron smollm3 xglm biogpt openai-gpt ctrl exaone4 helium ernie4_5 arcee
        seed_oss mamba mamba2 falcon_mamba jamba bamba rwkv recurrent_gemma gpt_oss deepseek_v2 deepseek_v3
        diffllama apertus
        hunyuan_v1_dense minicpm3 lfm2 nanochat modernbert-decoder vaultgemma phimoe dots1 ernie4_5_moe flex_olmo
        ministral gpt_neox_japanese jetmoe bitnet doge cwm trocr xlnet granitemoeshared falcon_h1 megatron-bert
        roc_bert bert-generation qwen3_next glm4_moe minimax"""),
    "batched experts": ("AutoModelForCausalLM", causal_lm, "mixtral qwen3_moe deepseek_v3"),
    "masked": ("AutoModelForMaskedLM", masked_lm, """
        bert roberta albert distilbert electra deberta deberta-v2 modernbert longformer mpnet camembert xlm-roberta
        xlm-roberta-xl convbert fnet funnel big_bird mobilebert squeezebert rembert roformer nystromformer ernie
        esm flaubert xlm ibert data2vec-text layoutlm yoso mra roberta-prelayernorm eurobert luke
        nomic_bert xmod"""),
    "seq2seq": ("AutoModelForSeq2SeqLM", seq2seq, """
        t5 mt5 umt5 bart mbart pegasus pegasus_x blenderbot blenderbot-small marian m2m_100 led longt5 bigbird_pegasus
        switch_transformers plbart mvp prophetnet t5gemma"""),
    "image": ("AutoModelForImageClassification", images, """
        vit beit swin swinv2 convnext convnextv2 resnet regnet segformer dinov2 dinov2_with_registers vit_msn
        mobilenet_v1 mobilenet_v2 poolformer pvt pvt_v2 focalnet bit ijepa siglip clip data2vec-vision swiftformer
        donut-swin"""),
    "segmentation": ("AutoModelForSemanticSegmentation", segmentation, "segformer"),
    "audio": ("AutoModelForAudioClassification", waves, """
        wav2vec2 hubert unispeech unispeech-sat wavlm sew sew-d data2vec-audio wav2vec2-conformer"""),
    "speech": ("AutoModelForSpeechSeq2Seq", spectrogram, "whisper"),
    "speech to text": ("AutoModelForSpeechSeq2Seq", speech, "speech_to_text"),
    "pairs": ("AutoModel", pairs, "clip siglip"),
    "classes": ("AutoModelForSequenceClassification", classes, "canine"),
}  # fmt: skip


# Further mixtures of experts, for `python -m benchmarks.coverage.context --mesh ep=2` alone.
FURTHER: tuple[str, Callable[[], Batch], str] = (
    "AutoModelForCausalLM",
    causal_lm,
    """
    afmoe aria_text cohere2_moe deepseek_v4 exaone_moe granitemoe_swa hunyuan_v1_moe hy_v3 hy_v4 inkling_text
    kolibri1 laguna lara_mini llama4_text mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text nemotron_h sarvam_moe
    solar_open""",
)


def build(task: str, kind: str) -> Case:
    """A model of transformers and its batch, from a fixed seed."""
    import transformers

    auto, batch, _ = TASKS.get(task, FURTHER)
    torch.manual_seed(0)
    config = config_of(kind)
    if task == "batched experts":
        config._experts_implementation = "batched_mm"
    model = getattr(transformers, auto).from_config(config)
    return model.train(), batch()


def case_of(name: str) -> tuple[str, str]:
    """The task and the model type of a case."""
    return names().get(name, ("mixtures", name))


def names() -> dict[str, tuple[str, str]]:
    """All cases by name: (task, model type)."""
    found: dict[str, tuple[str, str]] = {}
    for task, (_, _, kinds) in TASKS.items():
        for kind in kinds.split():
            name = kind if kind not in found else f"{kind} ({task})"
            found[name] = (task, kind)
    return found


def loss_fn(model: nn.Module, **batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


# They read values of the batch (is any token global? are the lengths right?): taken with `specialize=True`.
SPECIALIZED = frozenset(("longformer", "led", "flaubert", "xlm", "prophetnet"))

# Their experts are products by expert, which an axis `ep` splits.
MIXTURES = frozenset(
    (
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo", "granitemoe", "granitemoeshared",
        "gpt_oss", "deepseek_v2", "deepseek_v3", "phimoe", "ernie4_5_moe", "dots1", "glm4_moe", "minimax", "jamba",
        "switch_transformers",
    )
)  # fmt: skip

# Networks without attention: tp divides what it can of them.
NOT_TRANSFORMERS = frozenset(
    (
        "resnet", "regnet", "convnext", "convnextv2", "mobilenet_v1", "mobilenet_v2", "poolformer", "bit", "focalnet",
        "swiftformer", "mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "bamba", "jamba",
    )
)  # fmt: skip
