"""Small models of images, of sound, of images with text and of sound with text, and of time series.

Each row: kind, type of the model, head, function that makes a batch, settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.zoo import batches
from tests.zoo.batches import SENTENCES, Batch, captioned, pixels
from tests.zoo.language import BOTH_SIDES, GROUPED, PLAIN, WORDS


def _tower(model_type: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of one half of a model that has two kinds of input."""
    return {"model_type": model_type, **more}


VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
STAGES = {"image_size": 32, "drop_path_rate": 0.2}
SPEECH = {
    "vocab_size": WORDS,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "mask_time_prob": 0.2,
}
SPEECH = {
    "vocab_size": WORDS,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "mask_time_prob": 0.2,
}
TEXT_TOWER = PLAIN | {"projection_dim": 24, "attention_dropout": 0.1}
IMAGE_TOWER = VISION | {"projection_dim": 24, "attention_dropout": 0.1}
SERIES = {"prediction_length": 8, "context_length": 24}
FORECAST = SERIES | {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
                     "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                     "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "input_size": 1,
                     "lags_sequence": [1, 2, 7], "num_time_features": 1}  # fmt: skip

CLASSIFIERS: list[tuple[str, Mapping[str, Any]]] = [
    ("vit", VISION),
    ("beit", VISION | {"drop_path_rate": 0.1}),
    ("dinov2", VISION | {"drop_path_rate": 0.1}),
    ("swin", STAGES | {"patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 2],
                       "window_size": 4, "hidden_dropout_prob": 0.1}),
    ("swinv2", STAGES | {"patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 2],
                         "window_size": 4, "hidden_dropout_prob": 0.1}),
    ("convnext", STAGES | {"hidden_sizes": [12, 16, 24, 32], "depths": [1, 1, 2, 1]}),
    ("convnextv2", STAGES | {"hidden_sizes": [12, 16, 24, 32], "depths": [1, 1, 2, 1]}),
    ("resnet", {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 2],
                "layer_type": "basic"}),
    ("regnet", {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 2],
                "groups_width": 8}),
    ("segformer", STAGES | {"num_encoder_blocks": 2, "hidden_sizes": [16, 24], "depths": [1, 1],
                            "sr_ratios": [2, 1], "num_attention_heads": [2, 2],
                            "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}),
    ("poolformer", STAGES | {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    ("mobilenet_v2", {"image_size": 32, "depth_multiplier": 0.25}),
    ("mobilevit", {"image_size": 32, "hidden_sizes": [16, 24, 32],
                   "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 48], "num_attention_heads": 4}),
    ("efficientnet", {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.5,
                      "hidden_dim": 320}),
    ("cvt", {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 2]}),
    ("pvt_v2", STAGES | {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
                         "num_attention_heads": [1, 2, 2, 4]}),
]  # fmt: skip
Others = list[tuple[str, str, str, Callable[[], Batch], Mapping[str, Any]]]
VISIONS: Others = [
    ("vision", "vit_mae", "ForPreTraining", pixels(),
     VISION | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1,
               "decoder_intermediate_size": 64, "decoder_num_attention_heads": 2}),
    ("vision", "videomae", "ForVideoClassification", batches.video,
     VISION | {"num_frames": 4, "tubelet_size": 2}),
    ("vision", "timesformer", "ForVideoClassification", batches.video,
     VISION | {"num_frames": 4}),
    ("vision", "segformer", "ForSemanticSegmentation", batches.segments,
     STAGES | {"num_encoder_blocks": 2, "hidden_sizes": [16, 24], "depths": [1, 1],
               "sr_ratios": [2, 1], "num_attention_heads": [2, 2], "patch_sizes": [7, 3],
               "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}),
    ("vision", "yolos", "ForObjectDetection", pixels(),
     VISION | {"image_size": [32, 32], "num_detection_tokens": 8}),
    ("vision", "detr", "ForObjectDetection", pixels(),
     {"use_timm_backbone": False, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
      "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
      "decoder_ffn_dim": 64, "num_queries": 6,
      "backbone_config": _tower("resnet", embedding_size=8, hidden_sizes=[16, 24], depths=[1, 1],
                                out_features=["stage2"], layer_type="basic")}),
    ("vision", "perceiver", "", lambda: {"inputs": torch.randn(SENTENCES, 40, 24)},
     {"num_latents": 12, "d_latents": 32, "d_model": 24, "num_blocks": 1,
      "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
      "num_cross_attention_heads": 4, "qk_channels": 32, "v_channels": 32}),
]  # fmt: skip
SPEECHES: Others = [
    ("audio", "wav2vec2", "ForCTC", batches.spoken, SPEECH | {"ctc_loss_reduction": "mean"}),
    ("audio", "hubert", "ForCTC", batches.spoken, SPEECH | {"ctc_loss_reduction": "mean"}),
    ("audio", "wavlm", "ForCTC", batches.spoken,
     SPEECH | {"ctc_loss_reduction": "mean", "num_buckets": 16}),
    ("audio", "sew", "ForCTC", batches.spoken,
     SPEECH | {"ctc_loss_reduction": "mean", "squeeze_factor": 2}),
    ("audio", "wav2vec2-conformer", "ForCTC", batches.spoken,
     SPEECH | {"ctc_loss_reduction": "mean", "conv_depthwise_kernel_size": 7,
               "position_embeddings_type": "rotary"}),
    ("audio", "whisper", "ForSpeechSeq2Seq", batches.spectrogram,
     BOTH_SIDES | {"num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 32,
                   "apply_spec_augment": True, "mask_time_length": 2, "mask_time_prob": 0.2}),
    ("audio", "speech_to_text", "ForSpeechSeq2Seq",
     lambda: {"input_features": torch.randn(SENTENCES, 60, 16), "labels": batches.ids(12)},
     BOTH_SIDES | {"input_feat_per_channel": 16, "conv_channels": 16, "conv_kernel_sizes": [3, 3],
                   "max_source_positions": 60, "max_target_positions": 32}),
    ("audio", "audio-spectrogram-transformer", "ForAudioClassification",
     lambda: {"input_values": torch.randn(SENTENCES, 64, 16), "labels": torch.arange(4) % 2},
     VISION | {"num_mel_bins": 16, "max_length": 64, "time_stride": 4, "frequency_stride": 4}),
]  # fmt: skip
MULTIMODAL: Others = [
    ("multimodal", "clip", "", batches.clip,
     {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER, "projection_dim": 24}),
    ("multimodal", "siglip", "",
     lambda: {"input_ids": batches.ids(16), "pixel_values": torch.randn(SENTENCES, 3, 32, 32),
              "return_loss": True},
     {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER}),
    ("multimodal", "vilt", "", captioned(), VISION | PLAIN | {"max_image_length": 16}),
    ("multimodal", "git", "ForCausalLM", lambda: {**captioned()(), "labels": batches.ids(16)},
     PLAIN | {"vision_config": VISION}),
    ("multimodal", "blip", "", batches.clip,
     {"text_config": PLAIN | {"encoder_hidden_size": 48}, "vision_config": VISION,
      "projection_dim": 24, "image_text_hidden_size": 24}),
    ("multimodal", "llava", "ForImageTextToText",
     lambda: {"input_ids": torch.cat([torch.full((SENTENCES, 16), 95), batches.ids(16) % 90], 1),
              "pixel_values": torch.randn(SENTENCES, 3, 32, 32), "labels": batches.ids(32)},
     {"text_config": _tower("llama", **GROUPED),
      "vision_config": _tower("clip_vision_model", **IMAGE_TOWER),
      "image_token_index": 95, "vision_feature_layer": -1}),
]  # fmt: skip
SEQUENCES: Others = [
    ("time series", "patchtst", "PatchTSTForPrediction",
     lambda: {"past_values": torch.randn(SENTENCES, 24, 3),
              "future_values": torch.randn(SENTENCES, 8, 3)},
     SERIES | {"num_input_channels": 3, "patch_length": 4, "patch_stride": 4, "d_model": 32,
               "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
               "ff_dropout": 0.1, "attention_dropout": 0.1}),
    ("time series", "time_series_transformer", "TimeSeriesTransformerForPrediction",
     batches.forecast, FORECAST),
    ("time series", "informer", "InformerForPrediction", batches.forecast, FORECAST),
    ("time series", "autoformer", "AutoformerForPrediction", batches.forecast,
     FORECAST | {"label_length": 4, "moving_average": 5}),
    ("time series", "decision_transformer", "DecisionTransformerModel", batches.decisions,
     {"state_dim": 5, "act_dim": 3, "hidden_size": 48, "n_layer": 2, "n_head": 4,
      "max_ep_len": 20}),
]  # fmt: skip
