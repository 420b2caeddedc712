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
    """The differences between one model family and Qwen2.5-VL.

    A subclass overrides what differs in its models: their layers, their config.json, the tensors in their weight files,
    their prompts and images. docs/developer_guide.md shows how to add a family.
    """

    architecture: ClassVar[str]  # name of the model's class in transformers, as in config.json

    # ---- layers
    config_type: ClassVar[type[ModelConfig]] = ModelConfig
    vision_config_type: ClassVar[type[VisionConfig]] = VisionConfig
    layer_type: ClassVar[type[DecoderLayer]] = DecoderLayer
    # parts of the decoder that the option adapter.target can name: {name: regular expression for layer names}
    adapter_targets: ClassVar[Mapping[str, re.Pattern[str]]] = {}
    not_quantized: ClassVar[tuple[str, ...]] = ()  # name endings of layers that always keep their dtype
    in_cuda_graphs: ClassVar[bool] = True  # False if the shapes of a decode step depend on the values of tensors
    in_vllm: ClassVar[bool] = True  # whether extras/vllm.py supports the family

    # ---- config.json
    vision_hidden_act: ClassVar[str] = "silu"  # activation of the vision tower, as named in config.json
    # {key of config.json, outside vision_config: the values that the layers compute}; other values are refused
    supported: ClassVar[Mapping[str, tuple]] = {"hidden_act": ("silu",), "use_sliding_window": (False,)}

    # ---- weights
    # whether tensors in files are named after transformers' modules; see module_name
    files_have_module_names: ClassVar[bool] = False
    unused_prefixes: ClassVar[tuple[str, ...]] = ()  # name prefixes of unused tensors

    # ---- prompts and images
    # whether the chat template adds a default system message to prompts without one
    default_system: ClassVar[bool] = True
    # default values for keys that preprocessor_config.json may omit
    images: ClassVar[Mapping[str, Any]] = {}
    box_space: ClassVar[str] = "resized"  # unit of box coordinates in answers; see data/boxes.py

    def build_model(self, model_config: ModelConfig) -> VisionLanguageModel:
        """Build a model with uninitialized weights."""
        return VisionLanguageModel(model_config, self.build_tower, self.layer_type)

    def build_tower(self, vision_config: VisionConfig) -> VisionTower:
        return VisionTransformer(vision_config)

    def read_text(self, text: dict) -> dict:
        """Convert the keys of config.json, outside vision_config, to the field names of `config_type`."""
        return text

    def read_vision(self, vision: dict, where: str) -> dict:
        """Convert the keys of vision_config to the field names of `vision_config_type`.

        Args:
            where: path of config.json, for error messages.
        """
        return vision

    def write_config(self, config: dict) -> dict:
        """Convert a config with the keys of Qwen2.5-VL's config.json to the layout of this family's config.json."""
        return config

    def split_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], model_config: ModelConfig, file: Path
    ) -> Iterable[tuple[str, Tensor]]:
        """Yield (name, tensor) for each parameter in a weight file.

        A family overrides this method and stack_tensors if its files store several parameters as one tensor.
        """
        return tensors

    def stack_tensors(self, weights: dict[str, Weight], model_config: ModelConfig):
        """Replace the parameters that a file stores as one tensor with this tensor, in place."""

    def uses_every_parameter(self, model_config: ModelConfig, index: int) -> bool:
        """Return True if decoder layer `index` uses all its parameters for each token, so each gets a gradient."""
        return True

    def share_counts(self, model: VisionLanguageModel, sum_counts: Callable[[list[int]], list[int]]):
        """Prepare a sharded model whose layers use only some of their parameters for each token.

        If a rank uses a parameter, all ranks must run the parameter's layer, because they gather its weights together.

        Args:
            sum_counts: function that adds up a list of counts over all ranks.
        """

    def read_videos(self, settings: dict, where: str, images: ImageProcessor) -> Any:
        """Parse video_preprocessor_config.json; None stands for Qwen2.5-VL's video preprocessing."""
        return None

    def write_videos(self, images: ImageProcessor, options: dict) -> dict:
        """Return the content of video_preprocessor_config.json, or {} to copy the loaded model's file.

        Args:
            options: the recipe's section data.video.
        """
        return write_video_processor(images, options)
