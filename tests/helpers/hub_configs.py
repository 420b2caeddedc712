"""config.json of released models, as on the Hugging Face hub, and of tiny models, one per family.

Contents: tests/recorded/hub_configs.json. Tiny models have the sizes and ids in tiny.py.
"""

import copy
import json
from pathlib import Path

CONFIGS = json.loads((Path(__file__).parents[1] / "recorded" / "hub_configs.json").read_text())
# (parameters, tensors) in the files of hub models
SIZES = {
    "Qwen2.5-VL-3B": (3_754_622_976, 824),
    "Qwen2.5-VL-7B": (8_292_166_656, 729),
    "Qwen2.5-VL-32B": (33_452_718_336, 1161),
    "Qwen2.5-VL-72B": (73_410_777_344, 1353),
    "Qwen2-VL-2B": (2_208_985_600, 729),
    "Qwen2-VL-7B": (8_291_375_616, 730),
}
QWEN3_SIZES = {
    "Qwen3-VL-2B": (2_127_532_032, 625),
    "Qwen3-VL-4B": (4_437_815_808, 713),
    "Qwen3-VL-8B": (8_767_123_696, 750),
}


def real_config(size: str) -> dict:
    """Return config.json for a released model such as "Qwen2.5-VL-3B"."""
    return copy.deepcopy(CONFIGS[size])


def tiny_config(model_type: str, tied: bool) -> dict:
    return real_config(f"tiny {model_type}") | {"tie_word_embeddings": tied}
