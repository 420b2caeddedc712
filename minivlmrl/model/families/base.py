"""Base class for model families."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from minivlmrl.data.chat_template import DEFAULT
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.image_settings import write_video_processor
from minivlmrl.model.config import ModelConfig, VisionConfig
from minivlmrl.model.decoder import DecoderLayer, VisionLanguageModel
from minivlmrl.model.plain_weights import Weight
from minivlmrl.model.vision import VisionTower, VisionTransformer


class Family:
    """A model family; the defaults are those of Qwen2.5-VL, see docs/developer_guide.md.

    Subclasses override what differs in layers, config.json, weight files, prompts and images.
    """

    architecture: ClassVar[str]  # transformers class, as in architectures in config.json
    config_type: ClassVar[type[ModelConfig]] = ModelConfig
    vision_config_type: ClassVar[type[VisionConfig]] = VisionConfig
    layer_type: ClassVar[type[DecoderLayer]] = DecoderLayer
    # additional values for adapter.target: {name: regular expression for layer names}
    adapter_targets: ClassVar[Mapping[str, re.Pattern[str]]] = {}
    not_quantized: ClassVar[tuple[str, ...]] = ()  # name suffixes of layers that quantization skips
    in_cuda_graphs: ClassVar[bool] = True  # whether decode steps have fixed shapes, as CUDA graphs require
    in_vllm: ClassVar[bool] = True  # whether extras/vllm.py supports this family

    vision_hidden_act: ClassVar[str] = "silu"  # activation in the vision tower MLP
    # {config.json key outside vision_config: supported values}
    supported: ClassVar[Mapping[str, tuple]] = {"hidden_act": ("silu",), "use_sliding_window": (False,)}

    # whether weight files use transformers' module names; see module_name
    files_have_module_names: ClassVar[bool] = False
    unused_prefixes: ClassVar[tuple[str, ...]] = ()  # name prefixes of ignored tensors in weight files

    template: ClassVar[str] = DEFAULT  # Jinja chat template for model folders without one
    # default image settings, as in preprocessor_config.json
    images: ClassVar[Mapping[str, Any]] = {}
    box_space: ClassVar[str] = "resized"  # coordinate unit of predicted boxes; see data/boxes.py

    def build_model(self, model_config: ModelConfig) -> VisionLanguageModel:
        """Build a model with uninitialized weights."""
        return VisionLanguageModel(model_config, self.build_tower, self.layer_type)

    def build_tower(self, vision_config: VisionConfig) -> VisionTower:
        return VisionTransformer(vision_config)

    def read_text(self, text: dict) -> dict:
        """Convert keys in config.json, outside vision_config, to `config_type` fields."""
        return text

    def read_vision(self, vision: dict, where: str) -> dict:
        """Convert keys in vision_config to `vision_config_type` fields; `where` is the file, for error messages."""
        return vision

    def write_config(self, config: dict) -> dict:
        """Convert a config with Qwen2.5-VL's keys to this family's config.json."""
        return config

    def split_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], model_config: ModelConfig, file: Path
    ) -> Iterable[tuple[str, Tensor]]:
        """Yield (name, tensor) for parameters in a weight file.

        Families that store several parameters as one tensor override this method and stack_tensors.
        """
        return tensors

    def stack_tensors(self, weights: dict[str, Weight], model_config: ModelConfig):
        """Stack parameters in `weights`, in place, that weight files store as one tensor.

        Example: the matrices of all experts in a layer.
        """

    def uses_every_parameter(self, model_config: ModelConfig, index: int) -> bool:
        """Check whether layer `index` uses all its parameters for every token, unlike mixture-of-experts layers."""
        return True

    def share_counts(self, model: VisionLanguageModel, sum_counts: Callable[[list[int]], list[float]]):
        """In a sharded model, let expert layers sum their token counts over all ranks with `sum_counts`.

        If one rank uses an expert, all ranks must run it, because FSDP gathers its weights on all ranks.
        """

    def read_videos(self, settings: dict, where: str, images: ImageProcessor) -> Any:
        """Parse video_preprocessor_config.json; None means to resize videos as in Qwen2.5-VL."""
        return None

    def write_videos(self, images: ImageProcessor, options: dict) -> dict:
        """Return the contents of video_preprocessor_config.json, or {} to keep the file from the loaded model.

        Args:
            options: section data.video of the recipe.
        """
        return write_video_processor(images, options)
