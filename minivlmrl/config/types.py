"""Option types: strings that name files or code, and numbers with bounds; checked by config/parsing.py."""

import re
from typing import Annotated, Any, Literal, NewType

Plain = Any  # any YAML or JSON value: None, bool, int, float, str, list, dict

FilePath = NewType("FilePath", str)  # path relative to the working directory, unless the option says otherwise
RecipePath = NewType("RecipePath", str)  # path relative to the recipe's folder
Code = NewType("Code", str)  # built-in name, or "file.py:name" with a path relative to the recipe's folder
RewardName = NewType("RewardName", str)  # reward name, or "file.py:name"; see rewards/registry.py

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
# the merger projects vision tower outputs to decoder embeddings
VisualPart = Literal["vision", "merger"]
Part = Literal[VisualPart, "language", "embeddings"]
Frozen = NewType("Frozen", str)  # model part or layer range
LAYERS = re.compile(r"(layers|visual\.blocks)\.(\d+)(?:-(\d+))?")  # layers such as "layers.0-11" and "visual.blocks.7"
BoxSpace = Literal["original", "resized", "thousandths", "unit"]
Count = Annotated[int, ">= 1"]
Finite = Annotated[float, "(-inf, inf)"]
# min_pixels is at most 2**25, because patches for an image with 2**25 pixels take 2 GB
MinPixels = Annotated[int, f"[1, {2**25}]; patches of a larger image would fill the memory"]
Weights = dict[RewardName, Finite]
