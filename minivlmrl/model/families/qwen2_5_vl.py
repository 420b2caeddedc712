"""Qwen2.5-VL. Its modules and its config are the defaults of the package."""

from minivlmrl.model.families.registry import ROTARY_ONLY, ModelSpec

SPECS = {
    "qwen2_5_vl": ModelSpec(
        architecture="Qwen2_5_VLForConditionalGeneration", tower={"norm": "rms_norm", **ROTARY_ONLY}
    )
}
