"""Example tools: a calculator, and zooming into an image; your own tools: docs/agents.md.

Use in a recipe in the same folder:
    sampling: {environment: tools.py:Zoom}
"""

import re

import PIL.Image

from minivlmrl.data.boxes import Box


def calculator(expression: str) -> str:
    """Compute numbers with + - * / and brackets.

    Args:
        expression: such as (3 + 4) * 1.5
    """
    if not re.fullmatch(r"[\d.+\-*/() ]{1,200}", expression) or re.search(r"\*\*|//", expression):
        raise ValueError("use only numbers, + - * / and brackets, and at most 200 characters")
    return f"{eval(expression, {}):.12g}"  # safe: no names in the expression


class Zoom:
    """Environment with a tool to show part of a prompt image in full resolution."""

    def reset(self, images, extents, **columns):
        self.images = images
        self.extents = extents

    def zoom(self, bbox_2d: tuple[float, float, float, float], picture: int = 1) -> PIL.Image.Image:
        """Show a part of a picture in the resolution of its file.

        Args:
            bbox_2d: x1, y1, x2, y2 of the part, in the units of the family's boxes
            picture: which one, 1, 2, ...
        """
        if not 1 <= picture <= len(self.images):
            last = len(self.images)
            raise ValueError(f"picture is {picture}, but it must be between 1 and {last}")
        image = self.images[picture - 1]
        box = Box(*bbox_2d, self.extents[picture - 1]).to(image.size)
        corners = []
        for number, side in zip(box.numbers, image.size * 2, strict=True):
            corners.append(min(max(round(number), 0), side))
        x1, y1, x2, y2 = corners
        if x1 >= x2 or y1 >= y2:
            raise ValueError(f"bbox_2d {list(bbox_2d)} is empty; use x1 < x2 and y1 < y2")
        return image.crop(corners)
