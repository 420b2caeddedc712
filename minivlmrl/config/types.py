"""Option types: texts that name files or code, and numbers with bounds.

config/parsing.py reads a value according to its type. For example, a value of the type Annotated[int, ">= 1"] is
checked against the bound, and a path's type determines which folder the path is relative to.
"""

from typing import Annotated, Any, Literal, NewType

Plain = Any  # any YAML or JSON value: None, bool, int, float, str, list, dict

# a path relative to the working directory, unless the comment of a field names another folder
FilePath = NewType("FilePath", str)
RecipePath = NewType("RecipePath", str)  # relative to the recipe
Code = NewType("Code", str)  # a name, or "file.py:name" with the file relative to the recipe
RewardName = NewType("RewardName", str)  # reward name, or Code: see rewards/registry.py

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
# model parts, see PARTS in model/plain_weights.py; vision is the vision tower without merger
Part = Literal["vision", "merger", "language", "embeddings"]
Count = Annotated[int, ">= 1"]
Finite = Annotated[float, "(-inf, inf)"]
# The bound is 2**25 pixels, because their patches take 2 GB while they are computed.
MinPixels = Annotated[int, f"[1, {2**25}]; patches of a larger image would fill the memory"]
Weights = dict[RewardName, Finite]
