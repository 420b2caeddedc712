"""Types of options: texts that name files or code, and numbers with bounds.

The module config/parsing.py checks each value in a recipe against the type of its option.
"""

import re
from typing import Annotated, Any, Literal, NewType

Plain = Any  # any YAML or JSON value: None, bool, int, float, str, list, dict

FilePath = NewType("FilePath", str)  # relative to the working directory, unless the option's comment says otherwise
RecipePath = NewType("RecipePath", str)  # relative to the recipe
Code = NewType("Code", str)  # a name, or "file.py:name" with the file relative to the recipe
RewardName = NewType("RewardName", str)  # reward name, or Code: see rewards/registry.py

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
# parts of a model; the merger projects the vision tower's output to the size of text embeddings
Part = Literal["vision", "merger", "language", "embeddings"]
Frozen = NewType("Frozen", str)  # a Part, or a range of layers that LAYERS matches
LAYERS = re.compile(r"(layers|visual\.blocks)\.(\d+)(?:-(\d+))?")  # such as "layers.0-11" and "visual.blocks.7"
BoxSpace = Literal["original", "resized", "thousandths", "unit"]  # units of box coordinates
Count = Annotated[int, ">= 1"]
Finite = Annotated[float, "(-inf, inf)"]
# min_pixels may be at most 2**25: cutting an image of 2**25 pixels into patches takes 2 GB of memory.
MinPixels = Annotated[int, f"[1, {2**25}]; patches of a larger image would fill the memory"]
Weights = dict[RewardName, Finite]
