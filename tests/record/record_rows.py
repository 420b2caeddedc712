"""Record the token ids, pictures and time marks that transformers computes for the rows in tests/rows/cases.json.

Each row's messages are in the table, written by hand, so our reader is not used here. transformers renders the messages
with its own processor, from folders that it also writes: `record_rows.py models` writes tests/rows/models. For
Qwen2-VL's and Qwen2.5-VL's videos, qwen-vl-utils samples and resizes the frames, as Qwen's examples do.

Run with transformers 5.23.0, torchvision 0.28.0, qwen-vl-utils 0.0.14, av and decord:
PYTHONPATH=. python tests/record/record_rows.py [models]
"""

import functools
import json
import re
import sys

import PIL.Image
import PIL.ImageOps
import transformers
from qwen_vl_utils.vision_process import fetch_image, fetch_video, to_rgb
from tokenizers import AddedToken
from transformers.video_utils import load_video

from minivlmrl.data.chat_template import as_jinja
from minivlmrl.data.tokenizer import SPECIAL_TOKENS, STRUCTURE, train_tokenizer
from tests.helpers.hub_configs import tiny_config
from tests.helpers.user_rows import (
    ANSWERS,
    FILES,
    MODELS,
    RECORDED,
    Case,
    mean_colors,
    pack_ids,
    read_cases,
    to_messages,
)

# text from which the vocabulary is made: token ids must not depend on the table
TEXTS = [
    "What color is the square in the picture? It is red, green or blue. Find the cat. How many? Two. Answer: A. "
] * 9
TAGS = {"qwen2_vl": [], "qwen2_5_vl": ["<tool_call>", "</tool_call>"]}
NEWER_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
OWN_TOKENS = ["<SEG>", "<|medicine|>"]  # tokens that a user added to the model qwen2_5_vl
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


def write_model(name: str):
    """Write a tiny model's folder with transformers, without weights."""
    is_new = name.startswith("qwen3")
    trained = json.loads(train_tokenizer(TEXTS, vocab_size=400).backend.to_str())["model"]
    kind = transformers.Qwen3_5Tokenizer if name == "qwen3_5" else transformers.Qwen2Tokenizer
    tokenizer = kind(vocab=trained["vocab"], merges=list(map(tuple, trained["merges"])))
    tokens = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokens += [AddedToken(tag, special=False, normalized=False) for tag in TAGS.get(name, NEWER_TAGS)]
    if name == "qwen2_5_vl":
        tokens += [AddedToken(token, special="|" in token, normalized=False) for token in OWN_TOKENS]
    tokenizer.add_tokens(tokens)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    side = 32 if is_new else 28  # side of a token in pixels
    size = {"shortest_edge": 4 * side**2, "longest_edge": 16 * side**2}
    mean = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if is_new else {}
    patch = {"patch_size": side // 2, **mean}
    images = transformers.Qwen2VLImageProcessorPil(size=size, **patch)
    if is_new:
        videos = transformers.Qwen3VLVideoProcessor(size={**size, "longest_edge": 2**20}, **patch)
    else:
        videos = transformers.Qwen2VLVideoProcessor(size={"shortest_edge": 3136, "longest_edge": 12845056}, **patch)
    processors = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}
    template = (MODELS / name / "chat_template.jinja").read_text() if is_new else as_jinja()
    processor = getattr(transformers, processors.get(name, "Qwen3VLProcessor"))(
        images, tokenizer, videos, chat_template=template
    )
    processor.save_pretrained(MODELS / name)
    config = tiny_config(name, tied=True)
    ids = {
        "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>", "bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>",
    }  # fmt: skip
    for section in (config, config.get("text_config", config)):
        section |= {key: tokenizer.convert_tokens_to_ids(ids[key]) for key in section.keys() & ids.keys()}
        if "vocab_size" in section:
            section["vocab_size"] = len(tokenizer)
    config["vision_config"]["patch_size"] = side // 2
    (MODELS / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")


@functools.cache
def load_theirs(name: str):
    return transformers.AutoProcessor.from_pretrained(MODELS / name)


class Recorder:
    """Renders and encodes messages with transformers' processor for a case."""

    def __init__(self, case: Case):
        self.case = case
        self.processor = load_theirs(case.model)
        self.template = (FILES / case.template).read_text() if case.template else None
        self.is_new = case.model.startswith("qwen3")

    def render(self, messages: list[dict], **options) -> str:
        return self.processor.apply_chat_template(messages, chat_template=self.template, tokenize=False, **options)

    def encode(self, text: str, messages: list[dict]) -> dict:
        """Return a rendered text's token ids, and the tensors for its pictures and videos."""
        parts = [part for message in messages for part in message["content"] if part["type"] != "text"]
        kinds = re.findall(f"{re.escape(IMAGE)}|{re.escape(VIDEO)}", text)
        parts = parts[: len(kinds)]
        images = [self.load_image(part) for part in parts if part["type"] == "image"]
        videos = [self.load_video(part) for part in parts if part["type"] == "video"]
        options = {}
        if videos:
            options = {"videos": [frames for frames, _ in videos], "video_metadata": [data for _, data in videos]}
            options["do_sample_frames"] = False
        inputs = self.processor(text=[text], images=images or None, return_tensors="pt", **options)
        return {"kinds": [part["type"] for part in parts], **inputs}

    def load_image(self, part: dict):
        """Load an image upright, and resize it if the row says its size."""
        image = to_rgb(PIL.ImageOps.exif_transpose(PIL.Image.open(FILES / part["image"])))
        if part.keys() <= {"type", "image"}:
            return image
        return fetch_image({**part, "image": image}, image_patch_size=16 if self.is_new else 14)

    def load_video(self, part: dict) -> tuple:
        """Return a video's sampled frames and their metadata."""
        source = part["video"]
        names = source if isinstance(source, list) else None
        if self.is_new and names is None:
            sampling = {key: value for key, value in part.items() if key in ("fps", "num_frames")}
            return self.sample_frames(FILES / source, sampling)
        if self.is_new:
            frames = [PIL.Image.open(FILES / name).convert("RGB") for name in names]
            count = len(frames)
            data = {"fps": part.get("fps", 2.0), "total_num_frames": count, "frames_indices": list(range(count))}
            return frames, data
        paths = [f"file://{FILES / name}" for name in names] if names else str(FILES / source)
        rate = {"sample_fps": part.get("fps", 2.0)} if names else {}
        element = {**part, **rate, "video": paths}
        (frames, data), rate = fetch_video(
            element, return_video_sample_fps=True, return_video_metadata=True, image_patch_size=14
        )
        return frames, {"fps": rate, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}

    def sample_frames(self, path, sampling: dict) -> tuple:
        """Return the frames that transformers' video processor samples from a file, and their metadata."""
        choose = functools.partial(self.processor.video_processor.sample_frames, **sampling)
        return load_video(str(path), backend="pyav", sample_indices_fn=choose)

    def ids(self, text: str, messages: list[dict]) -> list[int]:
        return self.encode(text, messages)["input_ids"][0].tolist()

    def record_prompt(self, messages: list[dict]) -> dict:
        """Return the expected prompt: ids, grids, colours and seconds."""
        text = self.render(messages, add_generation_prompt=True)
        if self.case.typed:
            ids = self.typed_ids(text, messages)
            for written in self.typed_texts(messages):  # then only the row's pictures have placeholders
                text = text.replace(written, "")
            inputs = self.encode(text, messages)
        else:
            inputs = self.encode(text, messages)
            ids = inputs["input_ids"][0].tolist()
        recorded = {"ids": pack_ids(ids)}
        grids = {kind: inputs.get(f"{kind}_grid_thw") for kind in ("image", "video")}
        patches = {"image": inputs.get("pixel_values"), "video": inputs.get("pixel_values_videos")}
        if inputs["kinds"]:
            colors = {k: mean_colors(patches[k], grids[k]) for k in grids if grids[k] is not None}
            next_grid = {k: iter(grids[k].tolist()) for k in colors}
            recorded["grids"] = [next(next_grid[kind]) for kind in inputs["kinds"]]
            remaining = {k: list(v) for k, v in colors.items()}
            recorded["colors"] = []
            for kind, (depth, _, _) in zip(inputs["kinds"], recorded["grids"], strict=True):
                recorded["colors"] += remaining[kind][:depth]
                del remaining[kind][:depth]
        if inputs.get("second_per_grid_ts") is not None:
            recorded["seconds"] = [float(x) for x in inputs["second_per_grid_ts"]]
        return recorded

    def typed_texts(self, messages: list[dict]) -> list[str]:
        """Return the messages' texts that spell control tokens, the longest first."""
        texts = [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
        return sorted((text for text in texts if any(name in text for name in STRUCTURE)), key=len, reverse=True)

    def typed_ids(self, text: str, messages: list[dict]) -> list[int]:
        """Encode a rendered text, in which message texts that spell control tokens stay ordinary text."""
        tokenizer = self.processor.tokenizer
        texts = self.typed_texts(messages)
        ids = []
        for piece in re.split("(" + "|".join(map(re.escape, texts)) + ")", text):
            if piece in texts:
                ids += tokenizer(piece, split_special_tokens=True)["input_ids"]
            elif piece:
                ids += self.ids(piece, messages)
        return ids

    def record_answer(self, prompt: list[dict], answer: list[dict]) -> list[dict]:
        """Return the expected answer: a sequence, or one sequence per assistant turn.

        A sequence is the ids after its prompt, the ids of which are trained, and, from the second sequence on, the ids
        of its prompt.
        """
        messages = prompt + answer
        places = [i for i in range(len(prompt), len(messages)) if messages[i]["role"] == "assistant"]
        starts = {i: self.render(messages[:i], add_generation_prompt=True) for i in places}
        ends = {i: self.render(messages[: i + 1]).removesuffix("\n") for i in places}
        whole = ends[places[-1]]
        if all(whole.startswith(text) for text in (*starts.values(), *ends.values())):
            return [self.record_sequence([(starts[i], ends[i]) for i in places], messages)]
        sequences = []
        for i in places:
            sequence = self.record_sequence([(starts[i], ends[i])], messages[: i + 1])
            if i > places[0]:
                sequence["prompt"] = pack_ids(self.ids(starts[i], messages[:i]))
            sequences.append(sequence)
        return sequences

    def record_sequence(self, spans: list[tuple[str, str]], messages: list[dict]) -> dict:
        """Return the ids after the first start, and 1 for each id between a start and its end."""
        encode = self.typed_ids if self.case.typed else self.ids
        whole = encode(spans[-1][1], messages)
        trained = [0] * len(whole)
        for start, end in spans:
            assert end.startswith(start), (start, end)
            first, last = (encode(text, messages) for text in (start, end))
            # a prefix has the same tokens as in the whole text
            assert whole[: len(last)] == last and last[: len(first)] == first
            trained[len(first) : len(last)] = [1] * (len(last) - len(first))
        begin = len(encode(spans[0][0], messages))
        if self.template and "generation" in self.template:
            inputs = self.processor.apply_chat_template(
                messages,
                chat_template=self.template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            trained = list(inputs["assistant_masks"][0])[: len(whole)]
        return {"ids": pack_ids(whole[begin:]), "trained": pack_ids([int(x) for x in trained[begin:]])}


def record(case: Case) -> list[dict]:
    """Return transformers' results for each row in a case."""
    recorder = Recorder(case)
    recorded = []
    for row in case.rows:
        prompt = to_messages(row["prompt"])
        result = recorder.record_prompt(prompt)
        for name in ANSWERS:
            if name in row:
                result[name] = recorder.record_answer(prompt, to_messages(row[name]))
        recorded.append(result)
    return recorded


def main():
    if "models" in sys.argv:
        for folder in sorted(MODELS.iterdir()):
            write_model(folder.name)
    found = {}
    for name, case in read_cases().items():
        if not case.refused:
            try:
                found[name] = record(case)
            except Exception as error:
                raise RuntimeError(f"{name}: {error}") from error
    lines = [f'"{name}": {json.dumps(rows, separators=(",", ":"))}' for name, rows in sorted(found.items())]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(found)} cases, {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
