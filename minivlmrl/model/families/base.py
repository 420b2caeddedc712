"""The base class of all model families."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.image_settings import write_video_processor
from minivlmrl.model.config import ModelConfig, VisionConfig
from minivlmrl.model.decoder import DecoderLayer, VisionLanguageModel
from minivlmrl.model.plain_weights import Weight
from minivlmrl.model.vision import VisionTower, VisionTransformer


class Family:
    """What a model family does otherwise than Qwen2.5-VL; docs/developer_guide.md adds a family.

    Subclasses override layers, config.json, tensors of weight files, prompts and images.
    """

    architecture: ClassVar[str]  # class in transformers, as in config.json

    # ---- layers
    config_type: ClassVar[type[ModelConfig]] = ModelConfig
    vision_config_type: ClassVar[type[VisionConfig]] = VisionConfig
    layer_type: ClassVar[type[DecoderLayer]] = DecoderLayer
    # further values of adapter.target: {name: regular expression for layer names}
    adapter_targets: ClassVar[Mapping[str, re.Pattern[str]]] = {}
    not_quantized: ClassVar[tuple[str, ...]] = ()  # name endings of layers that keep their dtype
    in_cuda_graphs: ClassVar[bool] = True  # False: shapes of a decode step depend on tensor values
    in_vllm: ClassVar[bool] = True  # supported by extras/vllm.py

    # ---- config.json
    vision_hidden_act: ClassVar[str] = "silu"  # activation of the vision tower
    # {key of config.json: supported values}, outside vision_config
    supported: ClassVar[Mapping[str, tuple]] = {"hidden_act": ("silu",), "use_sliding_window": (False,)}

    # ---- weights
    # tensors are named after transformers' modules, see module_name
    files_have_module_names: ClassVar[bool] = False
    unused_prefixes: ClassVar[tuple[str, ...]] = ()  # name prefixes of unused tensors

    # ---- prompts and images
    # the chat template adds a system message to prompts without one
    default_system: ClassVar[bool] = True
    # defaults of preprocessor_config.json
    images: ClassVar[Mapping[str, Any]] = {}
    box_space: ClassVar[str] = "resized"  # unit of boxes in answers, see data/boxes.py

    def build_model(self, model_config: ModelConfig) -> VisionLanguageModel:
        """Build a model with uninitialized weights."""
        return VisionLanguageModel(model_config, self.build_tower, self.layer_type)

    def build_tower(self, vision_config: VisionConfig) -> VisionTower:
        return VisionTransformer(vision_config)

    def read_text(self, text: dict) -> dict:
        """Convert keys of config.json, outside vision_config, to fields of `config_type`."""
        return text

    def read_vision(self, vision: dict, where: str) -> dict:
        """Convert keys of vision_config to fields of `vision_config_type`.

        Args:
            where: path of config.json, for error messages.
        """
        return vision

    def write_config(self, config: dict) -> dict:
        """Convert a config with Qwen2.5-VL's keys to this family's config.json."""
        return config

    def split_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], model_config: ModelConfig, file: Path
    ) -> Iterable[tuple[str, Tensor]]:
        """Yield (name, tensor) of parameters in a weight file.

        Families whose files store several parameters in one tensor override this and stack_tensors.
        """
        return tensors

    def stack_tensors(self, weights: dict[str, Weight], model_config: ModelConfig):
        """Stack parameters that a file stores as one tensor, in place."""

    def uses_every_parameter(self, model_config: ModelConfig, index: int) -> bool:
        """Return True if layer `index` uses all its parameters for every token, so that all get a gradient."""
        return True

    def share_counts(self, model: VisionLanguageModel, sum_counts: Callable[[list[int]], list[int]]):
        """Prepare a sharded model whose layers use only some parameters per token.

        If one rank uses a parameter, all ranks must run its layer, because they gather weights together.

        Args:
            sum_counts: adds up a list of counts over all ranks.
        """

    def read_videos(self, settings: dict, where: str, images: ImageProcessor) -> Any:
        """Parse video_preprocessor_config.json, None = as in Qwen2.5-VL."""
        return None

    def write_videos(self, images: ImageProcessor, options: dict) -> dict:
        """Return video_preprocessor_config.json, {} = copy of the loaded file.

        Args:
            options: section data.video of the recipe.
        """
        return write_video_processor(images, options)
