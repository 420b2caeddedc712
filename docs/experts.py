"""Draw where the routers of a trained model send held-out pictures: python docs/experts.py RUN

RUN is the folder of a run of recipes/shapes.yaml with recipes/shapes_qwen3_vl_moe_model.json. Each tile of experts.png
is an image token in the colour of its likeliest expert, a row for each layer but the last, which computes no image
tokens. For 256 pictures it prints which experts are the likeliest of tiles of background alone, and of all others.
"""

import sys
from collections import Counter
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import torch

from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.families.experts import chosen_experts
from minivlmrl.model.packing import pack
from minivlmrl.tasks.shapes import Shapes

PICTURES, SHOWN, SCALE, GAP = 256, 8, 2, 8
COLOURS = ["#1f4e79", "#dd8a3c", "#5b8db8", "#9c4a00", "#9cc0de", "#f3bd87", "#4c9a6a", "#8a8f98"]


def tiles_with_object(image: PIL.Image.Image, size: int) -> list[bool]:
    """Say of each tile, row by row, whether it has a pixel that is not background."""
    corners = [image.getpixel((x, y)) for x in (0, image.width - 1) for y in (0, image.height - 1)]
    background = max(corners, key=sum)  # lighter than all objects
    found = []
    for y in range(0, image.height, size):
        for x in range(0, image.width, size):
            tile = image.crop((x, y, x + size, y + size))
            found.append(tile.getcolors()[0][1] != background or len(tile.getcolors()) > 1)
    return found


@torch.no_grad()
def likeliest_experts(model, processor, row) -> dict[int, list[int]]:
    """Return by layer the likeliest expert of each image token."""
    batch = pack([row.prompt(processor)], [[]], model.config)
    with chosen_experts(model) as chosen:
        model(batch, select=batch.layout.last_index)
    by_layer = chosen()
    by_layer.pop(model.config.num_hidden_layers - 1)
    return {layer: ids[batch.vision_index, 0].tolist() for layer, (_, ids) in by_layer.items()}


def tiled(experts: list[int], image: PIL.Image.Image, size: int) -> PIL.Image.Image:
    """Colour each tile by its expert, over the picture in grey."""
    sheet = PIL.Image.new("RGB", image.size)
    pen = PIL.ImageDraw.Draw(sheet)
    columns = image.width // size
    for number, expert in enumerate(experts):
        x, y = number % columns * size, number // columns * size
        pen.rectangle([x, y, x + size - 1, y + size - 1], fill=COLOURS[expert % len(COLOURS)])
    return PIL.Image.blend(sheet, image.convert("L").convert("RGB"), 0.25)


def main(run: Path):
    """Print the counts and write the picture."""
    model = load_model(run / "checkpoint")
    processor = load_processor(run / "checkpoint")
    size = processor.image_processor.factor
    shapes = Shapes(PICTURES, "eval")
    rows = [shapes[index] for index in range(PICTURES)]
    found = [likeliest_experts(model, processor, row) for row in rows]
    for layer in found[0]:
        counts = {"background": Counter(), "object": Counter()}
        for row, experts in zip(rows, found, strict=True):
            tiles = tiles_with_object(row.images[0], size)
            for expert, has_object in zip(experts[layer], tiles, strict=True):
                counts["object" if has_object else "background"][expert] += 1
        for kind, of_expert in counts.items():
            total = sum(of_expert.values())
            shares = ", ".join(f"{expert}: {count / total:.3f}" for expert, count in of_expert.most_common())
            print(f"layer {layer}, {total} tiles of {kind}: likeliest expert {shares}")
    side = rows[0].images[0].width * SCALE
    step = side + GAP
    sheet = PIL.Image.new("RGB", (SHOWN * step - GAP, (1 + len(found[0])) * step - GAP), "white")
    for column, (row, experts) in enumerate(zip(rows[:SHOWN], found, strict=False)):
        [image] = row.images
        for number, cell in enumerate([image, *(tiled(experts[layer], image, size) for layer in experts)]):
            sheet.paste(cell.resize((side, side), PIL.Image.NEAREST), (column * step, number * step))
    sheet.save(Path(__file__).with_name("experts.png"), optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
