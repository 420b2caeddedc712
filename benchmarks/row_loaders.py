"""Read the files in tests/rows with other projects' loaders, and print how many files each loader reads right.

A loader runs in an environment in which its project is installed, without a GPU and without weights:

    python benchmarks/row_loaders.py trl trl.json             # TRL's vision collators, on rows that `datasets` loads
    python benchmarks/row_loaders.py transformers hf.json     # apply_chat_template on a row's messages
    python benchmarks/row_loaders.py swift swift.json         # ms-swift: load_dataset and template.encode
    python benchmarks/row_loaders.py factory factory.json     # LLaMA-Factory: get_dataset, with a dataset_info.json
    python benchmarks/row_loaders.py minivlmrl ours.json
    python benchmarks/row_loaders.py table ours.json trl.json hf.json swift.json factory.json

A file is read right if the texts of all rows and their pictures equal the recorded ones; the tokens of pictures are
counted as one, a default system message is ignored, and which tokens are trained is not compared. A refusal has a name
if its message contains a text, a path or a column of the file, or words that cases.json demands.

Result for 107 files to read and 45 to refuse (2026-11; the columns are OUTCOMES, then read and the two refusals):

    minivlmrl            107   0   0   0    0  45   0
    TRL 1.16.0            25  14  32  36    7  13  25
    transformers 5.23.0   19  21   0  67    7   6  32
    ms-swift 4.6.0        59  23   2  23   21   5  19
    LLaMA-Factory 0.9.5   31  11  19  46    6   9  30

Most refusals are formats that a project does not claim to read, so these counts do not say how good a project is. A few
of the 45 are formats of the other project, like TRL's column `text`. Beside torch 2.13.0+cpu, torchvision's wheel for
CUDA and torchaudio do not load and had to be replaced in part. Without torchcodec, transformers and TRL could not
decode the video files.
"""

import contextlib
import importlib.metadata
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}

from user_rows import ANSWERS, FILES, MODELS, RECORDED, REQUIRED, Case, mean_colors, read_cases, unpack_ids  # noqa: E402

PACKAGES = {"trl": "trl", "transformers": "transformers", "swift": "ms-swift", "factory": "llamafactory"}
NAMES = {"minivlmrl": "minivlmrl", "trl": "TRL", "transformers": "transformers", "swift": "ms-swift",
         "factory": "LLaMA-Factory"}  # fmt: skip
DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
OUTCOMES = ("right", "wrong", "refused with a name", "refused without")

# A loader is a function that takes a case. It returns, for each row, its sequences' token ids (a prompt with its
# answer, or two sequences for a pair), and its pictures' mean colours.
Rows = list[tuple[list[list[int]], list]]


def colors_of(inputs) -> list:
    """Return the pictures' mean colours from a processor's tensors."""
    colors = []
    for patches, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        if inputs.get(grid) is not None:
            colors += mean_colors(inputs[patches], inputs[grid])
    return colors


def load_hub_rows(case: Case):
    """Load rows as TRL's examples do: with datasets, the image columns decoded."""
    import datasets

    suffix = Path(case.file).suffix[1:]
    kind = {"jsonl": "json", "tsv": "csv"}.get(suffix, suffix)
    options = {"sep": "\t"} if suffix == "tsv" else {}
    rows = datasets.load_dataset(kind, data_files=str(FILES / case.file), split="train", **options)
    rows = rows.rename_columns({old: new for old, new in case.options.get("columns", {}).items() if old != new})
    for name, feature in (("image", datasets.Image()), ("images", datasets.Sequence(datasets.Image()))):
        if name in rows.column_names:
            is_list = type(rows.features[name]).__name__ in ("List", "Sequence")
            rows = rows.cast_column(name, datasets.Sequence(datasets.Image()) if is_list else feature)
    return rows


def load_processor(case: Case):
    import transformers

    processor = transformers.AutoProcessor.from_pretrained(MODELS / case.model)
    if case.template:
        processor.chat_template = (FILES / case.template).read_text()
    return processor


def read_with_trl(case: Case) -> Rows:
    from trl.data_utils import prepare_multimodal_messages
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
    from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    processor = load_processor(case)
    collators = {
        "sft": DataCollatorForVisionLanguageModeling,
        "dpo": DataCollatorForVisionPreference,
        "kto": DataCollatorForVisionUnpairedPreference,
    }
    found = []
    for row in load_hub_rows(case):
        if case.stage == "grpo":  # as GRPOTrainer prepares its prompts
            images = row.get("images") or ([row["image"]] if row.get("image") else [])
            prompt = row["prompt"]
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            found.append(render(processor, [prepare_multimodal_messages(prompt, images=images)], True))
        elif "image" in row or "images" in row:
            inputs = collators[case.stage](processor)([row])
            mask = inputs["attention_mask"].bool()
            ids = [sequence[kept].tolist() for sequence, kept in zip(inputs["input_ids"], mask, strict=True)]
            found.append((ids, colors_of(inputs)))
        else:  # without these columns, the trainers only apply the chat template
            found.append(render(processor, conversations_of(row), False))
    return found


def conversations_of(row: dict) -> list[list[dict]]:
    """Return a row's whole conversations in TRL's formats: one conversation, or two for a pair."""
    if "messages" in row:
        return [row["messages"]]
    answers = [row[name] for name in ANSWERS if row.get(name)]
    if not answers:
        raise KeyError("text")  # as SFTTrainer for a row that is no conversation
    return [row.get("prompt", []) + answer for answer in answers]


def render(processor, conversations: list[list[dict]], add_generation_prompt: bool) -> tuple[list[list[int]], list]:
    ids, inputs = [], {}
    for messages in conversations:
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = processor.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **options)
        ids.append(inputs["input_ids"][0].tolist())
    return ids, colors_of(inputs)


def read_with_transformers(case: Case) -> Rows:
    processor = load_processor(case)
    is_prompt = case.stage == "grpo"
    rows = load_hub_rows(case)
    return [render(processor, [row["prompt"]] if is_prompt else conversations_of(row), is_prompt) for row in rows]


def read_with_swift(case: Case) -> Rows:
    from swift.dataset import load_dataset
    from swift.model import get_processor
    from swift.template import get_template

    processor = get_processor(str(MODELS / case.model), model_type=case.model)
    template = get_template(processor, template_type=case.model)
    template.set_mode({"dpo": "rlhf", "kto": "kto"}.get(case.stage, "train"))
    rows, _ = load_dataset(str(FILES / case.file), columns=case.options.get("columns"), load_from_cache_file=False)
    found = []
    for row in rows:
        inputs = template.encode(dict(row))
        names = [
            n for n in ("input_ids", "chosen_input_ids", "rejected_input_ids", "completion_input_ids") if inputs.get(n)
        ]
        prefix = "chosen_" if "chosen_input_ids" in names else ""
        pictures = {key.removeprefix(prefix): value for key, value in inputs.items()}
        found.append(([list(inputs[name]) for name in names], colors_of(pictures)))
    return found


FACTORY_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
FACTORY_TEXTS = {  # {name in dataset_info.json: column names}
    "prompt": ("instruction", "query", "question", "problem", "prompt"),
    "query": ("input",),
    "response": ("output", "response", "answer", "completion", "solution"),
}
FACTORY_COLUMNS = {"system", "tools", "images", "videos", "chosen", "rejected", "kto_tag", "history"}


def describe_for_factory(case: Case, columns: list[str]) -> dict:
    """Write the dataset_info.json entry that LLaMA-Factory's README asks for."""
    entry = {"file_name": str(FILES / case.file), "ranking": case.stage == "dpo", "columns": {}}
    entry["columns"] = {name: name for name in columns if name in FACTORY_COLUMNS}
    if "image" in columns:
        entry["columns"]["images"] = "image"
    if "video" in columns:
        entry["columns"]["videos"] = "video"
    if case.stage == "kto" and "label" in columns:
        entry["columns"]["kto_tag"] = "label"
    if "conversations" in columns or "messages" in columns:
        entry["formatting"] = "sharegpt"
        entry["columns"]["messages"] = "conversations" if "conversations" in columns else "messages"
        if "messages" in columns:
            entry["tags"] = FACTORY_TAGS | {"system_tag": "system"}
        return entry
    for name, ours in FACTORY_TEXTS.items():
        for column in ours:
            if column in columns:
                entry["columns"][name] = column
                break
    return entry


def read_with_factory(case: Case) -> Rows:
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    columns = load_hub_rows(case).column_names
    template_name = {
        "qwen2_vl": "qwen2_vl",
        "qwen2_5_vl": "qwen2_vl",
        "qwen3_vl": "qwen3_vl_nothink",
        "qwen3_5": "qwen3_5",
    }
    with tempfile.TemporaryDirectory() as folder:
        entry = describe_for_factory(case, columns)
        in_file = {ours: name for name, ours in case.options.get("columns", {}).items()}
        entry["columns"] = {key: in_file.get(name, name) for key, name in entry["columns"].items()}
        Path(folder, "dataset_info.json").write_text(json.dumps({"rows": entry}))
        stage = {"sft": "sft", "dpo": "rm", "kto": "kto", "grpo": "sft"}[case.stage]
        arguments = {
            "model_name_or_path": str(MODELS / case.model), "stage": stage, "do_train": True, "dataset": "rows",
            "dataset_dir": folder, "media_dir": str(FILES), "template": template_name[case.model], "output_dir": folder,
            "overwrite_cache": True, "report_to": "none", "remove_unused_columns": False, "use_cpu": True,
        }  # fmt: skip
        model_args, data_args, training_args, *_ = get_train_args(arguments)
        loaded = load_tokenizer(model_args)
        template = get_template_and_fix_tokenizer(loaded["tokenizer"], data_args)
        rows = get_dataset(template, model_args, data_args, training_args, stage=stage, **loaded)["train_dataset"]
        found = []
        for row in rows:
            names = [n for n in ("input_ids", "chosen_input_ids", "rejected_input_ids") if row.get(n)]
            images, videos = row.get("images") or [], row.get("videos") or []
            inputs = template.mm_plugin.get_mm_inputs(
                images, videos, [], [len(images)], [len(videos)], [0], [row[names[0]]], loaded["processor"]
            )
            found.append(([list(row[name]) for name in names], colors_of(inputs)))
    return found


def read_with_minivlmrl(case: Case) -> Rows:
    from dataclasses import replace

    import minivlmrl.model.checkpoint as checkpoint
    from minivlmrl.data.file_dataset import FileDataset
    from minivlmrl.data.folder_template import ChatTemplate
    from minivlmrl.data.processor import encode_answer

    processor = checkpoint.load_processor(MODELS / case.model)
    if case.template:
        text = (FILES / case.template).read_text()
        processor = replace(processor, template=ChatTemplate(text, case.template, processor.tokenizer.special_tokens))
    rows = FileDataset(FILES / case.file, REQUIRED[case.stage], **case.options)
    found = []
    for index in set(range(len(rows))) - {*case.skipped}:
        row = rows[index]
        prompt = row.prompt(processor)
        answers = [encode_answer(processor, row, getattr(row, n)) for n in ANSWERS if getattr(row, n) is not None]
        ids, pictures = prompt.input_ids.tolist(), mean_colors(prompt.pixel_values, prompt.image_grid_thw)
        if case.stage == "grpo" or not answers:
            found.append(([ids], pictures))
            continue
        for _, patches, grid in answers[0].pictures:
            pictures += mean_colors(patches, [grid])
        last = [answer.turns[-1] if answer.turns else answer for answer in answers]
        starts = [answer.prompt.input_ids.tolist() if answer.prompt else ids for answer in last]
        found.append(([a + b.ids.tolist() for a, b in zip(starts, last, strict=True)], pictures))
    return found


LOADERS = {
    "minivlmrl": read_with_minivlmrl,
    "trl": read_with_trl,
    "transformers": read_with_transformers,
    "swift": read_with_swift,
    "factory": read_with_factory,
}


def expected_rows(name: str, case: Case, recorded: dict) -> Rows:
    """Return a case's recorded sequences and colours; for an answer with several sequences, the last sequence."""
    found = []
    for row in recorded[name]:
        prompt = unpack_ids(row["ids"])
        answers = [row[column][-1] for column in ANSWERS if column in row]
        if case.stage == "grpo" or not answers:
            answers = [{"ids": []}]
        ids = [unpack_ids(a["prompt"]) if "prompt" in a else prompt for a in answers]
        found.append(([a + unpack_ids(b["ids"]) for a, b in zip(ids, answers, strict=True)], row.get("colors", [])))
    return found


def to_text(ids: list[int], model: str) -> str:
    """Decode ids, with each picture as one token and without the default system message."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(MODELS / model / "tokenizer.json"))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    text = re.sub(r"(<\|(?:image|video)_pad\|>)+", r"\1", text)
    return text.removeprefix(DEFAULT_SYSTEM).strip()


def is_same(found: Rows, expected: Rows, case: Case) -> bool:
    """Compare texts and pictures; for GRPO only the prompt, because some loaders append the solution."""
    if len(found) != len(expected):
        return False
    for (ids, colors), (known_ids, known_colors) in zip(found, expected, strict=True):
        texts, known_texts = ([to_text(sequence, case.model) for sequence in group] for group in (ids, known_ids))
        if case.stage == "grpo":
            texts = [text[: len(known)] for text, known in zip(texts, known_texts, strict=True)]
        if texts != known_texts:
            return False
        pairs = zip(flatten(colors), flatten(known_colors), strict=False)
        if len(colors) < len(known_colors) or any(abs(a - b) > 0.3 for a, b in pairs):
            return False
    return True


def flatten(values) -> list[float]:
    return [x for value in values for x in flatten(value)] if isinstance(values, list) else [values]


def is_named(message: str, case: Case) -> bool:
    """Return whether a message contains a text, a path or a column from the file, or words that cases.json demands."""
    content = (FILES / case.file).read_bytes().decode("utf-8", "ignore")
    texts = {text for text in re.findall(r'"([^"\\]{6,60})"', content) if " " in text or "?" in text}
    paths = {*re.findall(r"[\w./-]+\.(?:png|jpg|webp|gif|mp4)", content)}
    columns = {repr(name) for name in re.findall(r'"(\w+)":', content)}
    return any(words in message for words in {*texts, *paths, *columns, *case.refused})


def judge(name: str, case: Case, read, recorded: dict) -> tuple[str, str]:
    """Return an outcome from OUTCOMES and the error message."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = read(case)
    except (Exception, SystemExit) as error:  # every loader has its own errors
        message = f"{type(error).__name__}: {error}"
        return ("refused with a name" if is_named(message, case) else "refused without"), message[:300]
    if case.refused:
        return "wrong", ""
    return ("right" if is_same(found, expected_rows(name, case, recorded), case) else "wrong"), ""


def run(loader: str, path: str):
    """Read all files with a loader, and write {case name: [outcome, message]} and the version."""
    os.chdir(FILES)  # pictures' relative paths start here
    recorded = json.loads(RECORDED.read_text())
    version = importlib.metadata.version(PACKAGES[loader]) if loader in PACKAGES else ""
    outcomes = {name: judge(name, case, LOADERS[loader], recorded) for name, case in read_cases().items()}
    Path(path).write_text(json.dumps({"loader": loader, "version": version, "outcomes": outcomes}, indent=1))
    print(loader, version, Counter(outcome for outcome, _ in outcomes.values()))


def table(paths: list[str]):
    """Print a Markdown table: outcomes for the cases that can be read, and for the cases that must be refused."""
    cases = read_cases()
    readable = [name for name, case in cases.items() if not case.refused]
    print(f"| | {len(readable)} cases to read: {' | '.join(OUTCOMES)} | {len(cases) - len(readable)} to refuse: "
          "read | refused with a name | refused without |")  # fmt: skip
    print("|---" * 8 + "|")
    for path in paths:
        result = json.loads(Path(path).read_text())
        counts = Counter((name in readable, outcome) for name, (outcome, _) in result["outcomes"].items())
        cells = [counts[True, outcome] for outcome in OUTCOMES] + [counts[False, outcome] for outcome in OUTCOMES[1:]]
        print(f"| {NAMES[result['loader']]} {result['version']} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table(sys.argv[2:])
    else:
        run(sys.argv[1], os.path.abspath(sys.argv[2]))
