"""Test completions that call tools: the sampler and the trainer compute the same log-probabilities."""

import json
import re
from dataclasses import replace
from itertools import chain, groupby

import PIL.Image
import pytest
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from minivlmrl.config.options import SamplingOptions
from minivlmrl.data import chat_template, image, tokenizer
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.rows import Row
from minivlmrl.distributed.process_group import World
from minivlmrl.extras.agents import tool_sampler
from minivlmrl.extras.agents.environment import with_tools
from minivlmrl.extras.agents.tool_processor import ToolProcessor
from minivlmrl.extras.agents.tool_sampler import ToolSampler
from minivlmrl.generation import cuda_graphs, generate
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack
from tests.extras.agents.scripted import model_of, sample_script
from tests.helpers import tiny
from tests.helpers.links import ROOT
from tests.helpers.pretend_cuda import CUDA, PretendCuda, pretend
from tests.helpers.runs import metrics
from tests.helpers.stages import ONE
from tests.helpers.talk import IMAGE_PART, assistant, text, user

EYE = f"{__name__}:Eye"  # an environment as recipes name it


class Eye:
    """An environment whose tools return text, or an image with a given number of tokens per side."""

    def reset(self, problem, images, extents, **columns):
        self.problem, self.size, self.extents = problem, images[0].size, extents

    def look(self, columns: int, rows: int = 1) -> PIL.Image.Image:
        return PIL.Image.radial_gradient("L").resize((28 * columns, 28 * rows))

    def read(self, what: str) -> str:
        return f"{self.problem} {what} {self.size}"

    def both(self) -> list:
        return ["a", PIL.Image.new("RGB", (56, 28)), "b"]


TOKENIZER = tokenizer.train_tokenizer(["the cat sat on the mat, a small red cat"] * 3, 300)
PROCESSOR = Processor(TOKENIZER, image.ImageProcessor(min_pixels=28 * 28))
ZOOM, CALCULATOR = (f"{ROOT}/recipes/tools.py:{name}" for name in ("Zoom", "calculator"))
END = PROCESSOR.tokenizer.special_tokens["<|im_end|>"]
RATIO = "but its aspect ratio must be at most 200; crop or remove the image"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def row(size=(56, 84), **columns):
    return Row([user([IMAGE_PART, text("?")])], [PIL.Image.new("RGB", size)], columns)


def sample_texts(monkeypatch, *texts, model=None, tokens=400, columns=(), processor=PROCESSOR, **options):
    """Sample with a policy that writes `texts`, in which "~" separates turns: (completions, prompts, model)."""
    model = model or model_of(PROCESSOR)
    scripts = [[i for turn in words.split("~") for i in (*PROCESSOR.tokenizer.encode(turn), END)] for words in texts]
    rows = [row((56, 84 + 28 * i), **{"problem": "P"} | dict(columns)) for i in range(2 - len(texts) % 2)]
    options |= {"environment": EYE, "max_new_tokens": tokens}
    return *sample_script(monkeypatch, scripts, rows, processor, model, **options), model


def as_text(completion):
    """Return the text of a completion, with tool results in brackets and images as their numbers of tokens."""
    runs = groupby(zip(completion.policy_mask.tolist(), completion.ids.tolist(), strict=True), key=lambda pair: pair[0])
    texts = [(written, PROCESSOR.tokenizer.decode([i for _, i in run])) for written, run in runs]
    text = "".join(text if written else f"[{text}]" for written, text in texts)
    text = re.sub(r"(<\|image_pad\|>)+", lambda found: str(len(found[0]) // 13), text)
    return text.replace("<|vision_start|>", "(").replace("<|vision_end|>", ")")


TEXTS = ["no", "<look>2</look>a", "<look>1, 3</look>b <look>3</look><look>2, 2</look>c", "<both></both>d"]


@pytest.mark.parametrize(("model_type", "options"), [
    ("qwen2_5_vl", {}), ("qwen3_vl", {"min_p": 1e-9, "repetition_penalty": 1.01}), ("qwen3_5", {}),
], ids=str)  # fmt: skip
def test_the_sampler_equals_the_scorer(monkeypatch, model_type, options):
    """Sampler and trainer agree to 1e-4 nats, and a tool result needs no decode step."""
    model, steps, step = model_of(PROCESSOR, model_type), [], generate.Decode.__call__
    monkeypatch.setattr(generate.Decode, "__call__", lambda *given: steps.append(1) or step(*given))
    groups, prompts, _ = sample_texts(monkeypatch, *TEXTS, model=model, **options)
    assert len(steps) == max(int(c.policy_mask.sum()) for group in groups for c in group) - 1
    assert [len(c.pictures) for group in groups for c in group] == [0, 1, 3, 1]
    batch = pack(prompts, groups, model.config)
    logps = batch.pad(per_token_logps(model, batch)[0])
    drawn = batch.pad(torch.cat([c.logps for group in groups for c in group]))
    assert ((logps - drawn) * batch.completion_mask).abs().max() < 1e-4
    assert batch.completion_mask.sum() == sum(len(PROCESSOR.tokenizer.encode(text)) + 1 for text in TEXTS)


def test_a_simulated_graph_continues_after_tool_results(monkeypatch):
    """Tool results enlarge the buffers of keys and values, and Qwen3.5 also has recurrent states."""
    monkeypatch.setattr(cuda_graphs, "KEYS", 16)
    monkeypatch.setattr(cuda_graphs.StaticDecodeAttention, "check_every", 4)
    model, words = model_of(PROCESSOR, "qwen3_5"), TEXTS[1:3]
    expected, *_ = sample_texts(monkeypatch, *words, model=model)
    with PretendCuda(), torch.inference_mode():
        found, *_ = sample_texts(monkeypatch, *words, model=pretend(model), world=World(device=CUDA))
    for ours, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert as_text(ours) == as_text(theirs) and (ours.logps - theirs.logps).abs().max() < 1e-4  # float32


def test_a_stop_string_ends_a_completion_before_its_call_is_answered(monkeypatch):
    """A stop string may begin in a tool result, but must end in sampled text."""
    answer = "[<result>P x (56, 84)</result>]"
    ends = {"</read>": "<read>x</read>", "t><look>": f"<read>x</read>{answer}<look>"}
    ends["ult>"] = f"<read>x</read>{answer}<look>1</look>[(1)]end<|im_end|>"
    for stop, expected in ends.items():
        [[completion]], *_ = sample_texts(monkeypatch, "<read>x</read><look>1</look>end", stop_strings=[stop])
        assert as_text(completion) == expected and completion.stopped
        assert len(completion.pictures) == expected.count("(1)")


@pytest.mark.parametrize(("words", "answer", "after"), [
    ("<look>2, 1</look>", "(2)", "ok"),
    ("<read><|im_end|></read>", "<result>P <|im_end|> (56, 84)</result>", ""),
    ("<read>x</look></read>", "<result>P x</look> (56, 84)</result>", "ok"),
    ("<both></both>", "<result>a</result>(2)<result>b</result>", ""),
    ("<look>two</look>", "<result>error: look: columns is 'two', but it must be of type int</result>", "ok"),
    ("<look>300</look>", f"<result>error: the image has 8400 x 28 pixels, {RATIO}</result>", ""),
])  # fmt: skip
def test_a_call_in_tags(monkeypatch, words, answer, after):
    [[completion]], _, _ = sample_texts(monkeypatch, words + after)
    assert as_text(completion) == words + f"[{answer}]" * bool(answer) + after + "<|im_end|>" and completion.stopped
    assert PROCESSOR.decode(completion.ids[completion.policy_mask]) == words + after
    assert (completion.logps[~completion.policy_mask] == 0).all()


def picture(columns):
    return PIL.Image.radial_gradient("L").resize((28 * columns, 28))


TOLD, LAST = "P left (56, 84)", {"role": "assistant", "content": "<answer>a</answer>"}
DEMONSTRATED = {
    "a turn of a tool": [assistant("<read>left</read>\n"), {"role": "tool", "content": TOLD}, LAST],
    "its text": [assistant(f"<read>left</read><result>{TOLD}</result><answer>a</answer>")],
    "a tool's picture": [
        assistant("<look>2</look>"), {"role": "tool", "content": [text(""), IMAGE_PART | {"image": picture(2)}]}, LAST,
    ],
    "a picture": [assistant([text("<look>2</look>"), IMAGE_PART | {"image": picture(2)}, text(LAST["content"])])],
    "both": [
        assistant("<both></both>"),
        {"role": "tool", "content": [text("a"), IMAGE_PART | {"image": Eye().both()[1]}, text("b")]}, LAST,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", DEMONSTRATED)
def test_demonstrated_calls_have_the_ids_of_the_sampler(monkeypatch, name):
    turns = DEMONSTRATED[name]
    demonstrated = encode_completion(
        ToolProcessor(**vars(PROCESSOR) | {"tools": ("both", "look", "read")}), [user("?")], turns
    )
    words = PROCESSOR.decode(demonstrated.ids[demonstrated.policy_mask]).replace("\n", "")
    [[completion]], _, _ = sample_texts(monkeypatch, words)
    assert demonstrated.ids.tolist() == completion.ids.tolist() or "\n" in turns[0]["content"]
    assert as_text(demonstrated).replace("\n", "") == as_text(completion)


WRONG = 'error: a tool call must have the form {"name": ..., "arguments": {...}}'
TWO = CALL.format("look", '{"columns": 1}') + CALL.format("read", '{"what": ""}')
TURN = "[\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n]"


def test_turns_that_a_tool_joins_have_the_same_loss():
    turns = [assistant("<look>x</look>"), {"role": "tool", "content": "red"}, assistant("It is red.") | {"loss": False}]
    processor = ToolProcessor(**vars(PROCESSOR) | {"tools": ("look",)})
    with pytest.raises(ValueError, match="before and after the result has a loss; train on both turns or on"):
        encode_completion(processor, [user("?")], turns)
    turns = [turns[0] | {"loss": True}, turns[1], assistant("It is red.")]
    joined = encode_completion(processor, [user("?")], turns)
    assert processor.decode(joined.ids[joined.policy_mask]) == "<look>x</look>It is red."


@pytest.mark.parametrize(("words", "answer"), [
    (TWO, "(1)\n</tool_response>\n<tool_response>\nP  (56, 84)"),
    ("<tool_call>3</tool_call>", WRONG),
])  # fmt: skip
def test_a_call_in_qwens_format(monkeypatch, words, answer):
    [[completion]], _, _ = sample_texts(monkeypatch, f"{words}~done")
    assert as_text(completion) == f"{words}<|im_end|>{TURN.format(answer)}done<|im_end|>" and completion.stopped


PARAMETERS = "<tool_call>\n<function={}>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"
FAMILIES = {name: (CALL, "") for name in ("qwen2_5_vl", "qwen3_vl")}
FAMILIES |= {name: (PARAMETERS, "{}\n</think>\n\n") for name in ("qwen3_5_think", "qwen3_6", "qwen3_8")}
FAMILIES["qwen3_5_nothink"] = PARAMETERS, ""


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_with_tools_match_the_published_template(monkeypatch, published, name):
    form, thought = FAMILIES[name]
    template = PROCESSOR.template if name == "qwen2_5_vl" else chat_template.ChatTemplate(published(name), name)
    processor = with_tools(replace(PROCESSOR, template=template), EYE)
    words, turns, reasons = "", [], {"reasoning_content": "hm"} if thought else {}
    told = [IMAGE_PART | {"image": picture(2)}], 'P a "b" <c> é (56, 84)'
    for (tool, key, value), answer in zip((("look", "columns", 2), ("read", "what", 'a "b" <c> é')), told, strict=True):
        written = (json.dumps({key: value}, ensure_ascii=False),) if form == CALL else (key, value)
        words += thought.format("hm") + form.format(tool, *written) + "~"
        called = {"tool_calls": [{"function": {"name": tool, "arguments": {key: value}}}]}
        turns += [{"role": "assistant", "content": ""} | called | reasons, {"role": "tool", "content": answer}]
    turns += [assistant("done") | reasons]
    words += thought.format("hm") + "done"
    [[completion]], [prompt], _ = sample_texts(monkeypatch, words, processor=processor, tokens=900)
    given = {"chat_template": processor.template.text, "tools": processor.template.tools}
    (theirs,), _ = render_jinja_template([prompt.row.messages + turns], **given)
    grids = [*prompt.image_grid_thw.tolist(), *(grid for *_, grid in completion.pictures)]
    ids = chain(*processor.encode(processor.template._cut(theirs.removesuffix("\n"), ""), grids))
    assert [*prompt.input_ids.tolist(), *completion.ids.tolist()] == list(ids)
    assert completion.tool_use.counts == (2, 0, False)
    turns[0]["content"], [call] = None, turns[0]["tool_calls"]
    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert as_text(encode_completion(processor, prompt.row.messages, turns)) == as_text(completion)


def test_limits(monkeypatch):
    monkeypatch.setattr(Eye, "max_tool_calls", 1, raising=False)
    [[completion]], _, _ = sample_texts(monkeypatch, "<look>1</look><look>2</look>end")
    assert as_text(completion) == "<look>1</look>[(1)]<look>2</look>end<|im_end|>"
    long = len(PROCESSOR.tokenizer.encode("<look>9, 9</look>"))
    # 81 image tokens, 2 tokens around the image, and 1 sampled token
    for tokens, fits in ((long + 83, False), (long + 84, True)):
        [[completion]], _, _ = sample_texts(monkeypatch, "<look>9, 9</look>end", tokens=tokens)
        assert not completion.stopped and len(completion.pictures) == fits
        assert len(completion.ids) == (tokens if fits else long) and completion.policy_mask[-1]
        assert completion.tool_use.counts == (1, 0, not fits)
    [[completion]], _, _ = sample_texts(monkeypatch, "<look>two</look>end")
    assert completion.tool_use.counts == (1, 1, False)


def test_environments_and_prompts_that_cannot_be_used_are_refused(monkeypatch):
    sampler = ToolSampler(model_of(PROCESSOR), PROCESSOR, SamplingOptions(environment=ZOOM, max_new_tokens=4), ONE)
    with pytest.raises(ValueError, match="the prompt has no row"):
        sampler([PROCESSOR(row().messages, row().images)], 1, [""])
    with pytest.raises(ValueError, match="gather_weights is false"):
        ToolSampler(tiny.model(), PROCESSOR, SamplingOptions(environment=CALCULATOR), ONE, False)
    monkeypatch.setattr(Eye, "reset", lambda self, **columns: "see")
    with pytest.raises(ValueError, match=f"^row -1: sampling.environment {EYE}: reset returned 'see', but it must"):
        sample_texts(monkeypatch, "a")


def test_completions_do_not_share_changes_of_their_row(monkeypatch):
    def reset(self, images, marks, **columns):
        self.images, self.marks = images, marks

    def draw(self, text: str) -> str:
        before = f"{len(self.images)} {self.marks} {self.images[0].getpixel((0, 0))}"
        self.images[0].paste("red", (0, 0, 9, 9))
        self.images.append(self.images[0])
        self.marks["all"].append(text)
        return before

    monkeypatch.setattr(Eye, "reset", reset)
    monkeypatch.setattr(Eye, "read", draw)
    groups, [prompt, _], _ = sample_texts(monkeypatch, *["<read>a</read>"] * 4, columns={"marks": {"all": []}})
    told = "[<result>1 {'all': []} (0, 0, 0)</result>]"
    assert {as_text(c) for group in groups for c in group} == {f"<read>a</read>{told}<|im_end|>"}
    assert prompt.row.images[0].getpixel((0, 0)) == (0, 0, 0) and prompt.row.columns["marks"] == {"all": []}


def test_a_run_saves_the_images_of_completions(run, quick, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tool_sampler, "token_bytes", lambda *_: b"<zoom></zoom>")
    find_calls = lambda text, tools, ended: [("zoom", "northeast")] * (len(text) > 64 and not ended)  # noqa: E731
    monkeypatch.setattr(tool_sampler, "find_calls", find_calls)
    for name in ("zoom.py", "zoom.yaml", "zoom_model.json"):
        words = (ROOT / "recipes" / name).read_text().replace("max_tool_calls = 1", "max_tool_calls = 2")
        (tmp_path / name).write_text(words)
    options = ["--stages=[grpo]", "--num_threads=1", "--data.eval_rows=2", "--log_completions=1"]
    options += ["--grpo.max_steps=2", "--grpo.prompts_per_step=2"]
    whole = run(*options, recipe=tmp_path / "zoom.yaml")
    logged = [one for line in metrics(whole, "completions.jsonl") for one in line["completions"]]
    assert max(len(one.get("pictures", ())) for one in logged) == 2
    for one in logged:
        forced = [text for text, logp in one["tokens"] if logp is None]
        # an image may follow an incomplete UTF-8 character
        begins = [text for text in forced if text.endswith("<|vision_start|>")]
        assert len(begins) == len(one.get("pictures", ()))
        assert all((whole / path).is_file() for path in one.get("pictures", ()))
    for line in metrics(whole):
        assert line["rollout/logp_mismatch"] < 1e-4 and line["tools/call_frequency"] > 1
        assert line["tools/failure_frequency"] == line["tools/cut_ratio"] == 0


@pytest.mark.parametrize(("space", "extent"), [("resized", (84, 56)), ("original", (90, 50))])
def test_tools_get_image_sizes_in_the_units_of_boxes(space, extent):
    """Boxes of Qwen2.5-VL are in pixels of the resized image, and not of the file."""
    processor = replace(PROCESSOR, box_space=space)
    sampler = ToolSampler(model_of(PROCESSOR), processor, SamplingOptions(environment=EYE), ONE)
    sampler.token_sampler([row((90, 50), problem="P").prompt(processor)], 1, [""])
    [episode] = sampler.episodes
    assert episode.environment.extents == [extent]
