"""Test a step's trace page: the page shows the step's values, and tracing changes nothing."""

import ast
import html
import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from links import ROOT

from minivlmrl.config.loading import load_config
from minivlmrl.data.image import ImageProcessor, patchify
from minivlmrl.diagnostics.replay import go_to
from minivlmrl.diagnostics.trace import TILES_PER_SIDE, StepTracer, matrix, pictures, saliency_maps
from minivlmrl.model.attention import visible
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack
from minivlmrl.run import loop
from tests.diagnostics.test_page import browse
from tests.diagnostics.test_replay import LOUD, SAME, replayed  # noqa: F401 (a fixture)

import stages


class Page:
    """A page's data, as its script reads them."""

    def __init__(self, path):
        text = path.read_text("utf-8")
        assert not re.search(r'(src|href)="(?!#|\$|data:)', text), "one file, no network"
        [data] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
        self.__dict__ |= json.loads(data)

    def value(self, number):
        """Return a value with its items, which the page stores by number."""
        value = self.values[number]
        if isinstance(value, dict) and "items" in value:
            value = value | {"items": [[name, self.value(item)] for name, item in value["items"]]}
        return value

    def values_of(self, name, function):
        """Return a variable's values in all calls of a function, in order."""
        events = [values for _, call, _, values, *_ in self.events if self.calls[call][1] == function]
        return [self.value(value) for values in events for _, key, value in values if key == name]


@pytest.fixture
def run_step(home, tmp_path, lively, plain):
    """Return a function that runs a step, with a trace or without.

    The function returns the page (or None), the trainer, the Step, its metrics and the new weights.
    """

    def run_step(stage, recorded, *options):
        options = [f"--output_dir={tmp_path / 'none'}", f"--stages=[{stage}]", *LOUD, *options]
        one = StepTracer([], stage, 1) if recorded else None
        trainer, optimizer, step, _ = go_to(load_config(home / "recipe.yaml", options), stage, 1, one)
        with one or nullcontext():
            metrics = loop.optimizer_step(trainer, step, optimizer, 1)
        if one:
            one.write(tmp_path / "step.html", "a step")
        page = Page(tmp_path / "step.html") if one else None
        return page, trainer, step, metrics, [x.detach().clone() for x in trainer.trained.parameters()]

    return run_step


@pytest.mark.parametrize("stage", ["sft", "dpo", "grpo", "ppo"])
def test_tracing_does_not_change_the_step(stage, run_step):
    _, _, _, metrics, weights = run_step(stage, False)
    page, _, _, traced_metrics, theirs = run_step(stage, True)
    assert traced_metrics == metrics and all(map(torch.equal, weights, theirs))
    order = [call[0] for call in page.calls]
    assert order[0] == "run/loop" and (
        stage == "ppo" or order.index("data/image") < order.index("model/decoder")
    )  # ppo: second pass
    before, norms, *_, after = page.values_of("norms of gradients", "optimizer_step")
    total = sum(value**2 for _, value in norms["items"]) ** 0.5
    assert before["items"] == after["items"] == [] and total == pytest.approx(metrics["grad_norm"], rel=1e-3)


def test_replay_writes_the_page(run, plain, lively, replayed, tmp_path):  # noqa: F811
    folder = run("--stages=[grpo]", *LOUD)
    out = tmp_path / "step.html"
    code, lines = replayed(folder, None, 2, f"--trace={out},trainers,mine.py")
    assert code == 2 and lines[-1].endswith(
        "mine.py is neither a Python file nor a folder of minivlmrl, such as losses"
    )
    code, lines = replayed(folder, None, 2, f"--trace={tmp_path / 'no' / 'step.html'}")
    assert code == 2 and lines[-1].endswith("Name a file in an existing folder, and do not use torchrun.")
    code, lines = replayed(folder, None, 2, f"--trace={out},trainers,{stages.__file__}")
    assert (code, lines[-2:]) == (0, SAME) and f"wrote {out}" in lines
    assert {"trainers/rollout_metrics", "helpers/stages"} < {call[0] for call in Page(out).calls}


def test_a_failing_step_is_traced_too(home, replayed, plain, lively, tmp_path):  # noqa: F811
    options = ["--stages=[grpo]", "--grpo.learning_rate=1e30", *LOUD, f"--output_dir={tmp_path / 'out'}"]
    code, lines = replayed(home / "recipe.yaml", "grpo", 1, *options, f"--trace={tmp_path / 'a.html'}")
    assert code == 2 and "not finite" in lines[-1] and Page(tmp_path / "a.html").events[-1][0] == "r"


def test_the_trace_of_a_sharded_step_is_the_same(home, replayed, plain, lively, tmp_path):  # noqa: F811
    norms = []
    weights = []
    for sharded in ("false", "true"):
        out = tmp_path / f"{sharded}.html"
        options = ["--stages=[grpo]", *LOUD, f"--output_dir={tmp_path / sharded}", f"--sharding.enabled={sharded}"]
        code, _ = replayed(home / "recipe.yaml", "grpo", 1, *options, f"--trace={out}")
        assert code == 0
        page = Page(out)
        gradients = max(page.values_of("norms of gradients", "optimizer_step"), key=lambda value: value["size"])
        norms.append(dict(gradients["items"]))
        group = page.values_of("group", "optimizer_step")[0]
        weights.append(dict(group["items"])["params"]["items"][0][1])
    assert norms[0] and norms[1] == pytest.approx(norms[0], rel=1e-3, abs=1e-6)
    assert weights[1]["shape"] == weights[0]["shape"]
    assert weights[1]["stats"] == pytest.approx(weights[0]["stats"], rel=1e-3, abs=1e-6)


def test_the_page_has_the_values_of_the_step(run_step):
    page, trainer, step, *_ = run_step("grpo", True)
    [batch], [run], decode = step.micro_batches, page.runs, trainer.processor.tokenizer.decode
    assert [page.words[str(i)] for i in run["ids"]] == [decode([i]) for i in batch.group.input_ids.tolist()]
    advantages = page.values_of("advantages", "grpo_loss")[-1]["rows"]  # (R, 1)
    assert [x for [x] in advantages] == pytest.approx(batch.advantages.tolist(), rel=1e-3)
    [ratio] = page.values_of("ratio", "grpo_loss")
    assert ratio["rows"] == torch.ones_like(batch.loss_mask).tolist() and ratio["stats"] == [1, 1, 1, 0]
    assert len(page.values_of("pixel_values", "VisionTransformer.forward")[-1]["pictures"]) == 4
    rounds = [n for call, _, name, n in page.more if page.calls[call][1] == "generate" and not name]
    assert 2 + max(rounds) == max(len(sample.completion.ids) for sample in step.rollout.samples)


def test_uninitialised_memory_has_no_numbers(home, replayed, plain, lively, tmp_path):  # noqa: F811
    """Until a line writes into the tensor that torch.empty returned, its numbers are arbitrary."""
    reward = tmp_path / "mine.py"
    code = "import torch\n\n\ndef long(completions, **columns):\n    x = torch.empty(\n        2)\n    x[:] = 1.5\n"
    reward.write_text(code + "    return [x.sum().item()] * len(completions)\n")
    options = [*LOUD, f"--rewards={{'{reward}:long': 1.0}}", f"--output_dir={tmp_path / 'out'}"]
    out = tmp_path / "a.html"
    code, _ = replayed(home / "recipe.yaml", "grpo", 1, "--stages=[grpo]", *options, f"--trace={out},{reward}")
    assert code == 0
    before, after = Page(out).values_of("x", "long")[:2]
    assert before == {"of": "uninitialised float32", "shape": [2]} and after["rows"] == [[1.5, 1.5]]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_the_page_opens_where_the_loss_has_been_computed(run_step, tmp_path, stage):
    """A number in the address opens another event."""
    page, *_ = run_step(stage, True)
    first = next(i for i, event in enumerate(page.events) if any(name == "loss" for _, name, _ in event[3]))
    opened = browse(tmp_path / "step.html", "", tmp_path)
    assert f"· #{first} of {len(page.events) - 1}" in opened and 'class="var new" data-path="loss"' in opened
    if stage == "grpo":
        assert page.calls[page.events[first][1]][1] == "grpo_loss"
    assert "run/loop.py:" in browse(tmp_path / "step.html", "0", tmp_path)


ASK = """{
const answers = {}, all = (selector) => [...document.querySelectorAll(selector)];
const text = (selector) => document.querySelector(selector).textContent, wait = (done) => setTimeout(done, 99);
const reads = () => document.activeElement.querySelector("output").textContent;
const press = (key, place = document.activeElement, times = 1) => {
  while (times--) place.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
};
const type = (selector, words) => {
  const input = document.querySelector(selector); input.value = words;
  input.dispatchEvent(new Event("input", {bubbles: true}));
};
const enter = () => { press("Enter", byId("query")); return new Promise(wait); };
const find = (words) => { type("#query", words); return enter(); };
const ask = async () => {
  await find("ratio"); answers.ratio = text('[data-path="ratio"] .largest');
  await find("batch.advantages"); press("ArrowRight", undefined, 3); answers.advantage = reads();
  answers.visible = innerWidth < 760 && byId("vars").getBoundingClientRect().top < innerHeight;
  type("#query", "entropy"); all("#found button").find((one) => one.textContent === "entropies").click();
  await enter(); answers.entropy = reads();
  for (const words of ["pixel values", "+ beta * kl", "learning rate"]) {
    type("#query", words); answers[words] = text("#found");
  }
  await find("norms of gradients"); answers.tower = text('[data-path="visual"] > :last-child');
  await find("group.position_ids"); press("ArrowRight", undefined, LAST); answers.position = reads();
  press("s", document.body); answers.without = text("#without");
  answers.sees = RUNS[0].ids.map((_, token) => { type(".ask", token); return text(".seen output"); });
};
ask().catch((error) => { answers.error = error.stack; }).then(() => { document.title = JSON.stringify(answers); });
}"""


@pytest.mark.slow
def test_ten_questions_about_a_custom_run(run_step, tmp_path):
    """Type, click and read in a browser that is as wide as a phone.

    The step is the second on its rollout, so that ratios differ from 1.
    """
    reward = tmp_path / "mine.py"
    reward.write_text("def long(completions, **columns):\n    return [float(len(c) > 9) for c in completions]\n")
    options = ["--grpo.num_iterations=2", "--grpo.num_generations=4", f"--rewards={{'{reward}:long': 1.0}}"]
    page, _, step, metrics, _ = run_step("grpo", True, *options)
    [batch], path = step.micro_batches, tmp_path / "step.html"
    prompt_length = batch.group.layout.prompt_lengths[0]
    script = f"<script>const LAST = {prompt_length - 1};{ASK}</script></body>"
    path.write_text(path.read_text("utf-8").replace("</body>", script), "utf-8")
    shown = browse(path, "", tmp_path, "--window-size=400,840", "--virtual-time-budget=60000")
    answers = json.loads(html.unescape(re.search("<title>(.*?)</title>", shown, re.DOTALL)[1]))
    assert answers.get("error", "") == "" and answers["visible"]
    index = batch.completion_index.tolist()
    names = [f"prompt {i // 4}, completion {i % 4}" for i in range(16)]
    [ratio] = page.values_of("ratio", "grpo_loss")
    largest = max(ratio["rows"][2][: batch.group.layout.row_lengths[2]])
    assert largest != 1 and f"2 ({names[index[2]]}): {largest:g} at " in answers["ratio"]
    assert answers["advantage"] == f"row 3 ({names[index[3]]}): {batch.advantages[3].item():.4g}"
    entropies = page.values_of("entropies", "GRPOTrainer.loss")[0]["rows"][0]
    assert answers["entropy"].startswith("row 0 (") and answers["entropy"].endswith(f": {entropies[0]:g}")
    shape = ", ".join(map(str, batch.group.pixel_values.shape))
    assert f"pixel_values: ({shape})" in answers["pixel values"]
    assert re.match(r"not run losses/grpo\.py:\d+ .*\+ beta \* kl$", answers["+ beta * kl"])
    assert f"returns.learning_rate: {metrics['learning_rate']:g}" in answers["learning rate"]
    norms = [
        norm for name, norm in page.values_of("norms of gradients", "optimizer_step")[1]["items"] if "visual." in name
    ]
    assert float(answers["tower"]) == pytest.approx(math.hypot(*norms), rel=1e-3)
    last = batch.group.position_ids[:, prompt_length - 1].tolist()
    time_height_width = "time {}, height {}, width {}".format(*last)
    assert answers["position"].startswith(f"token {prompt_length - 1} ") and time_height_width in answers["position"]
    left_out = [names[i] for i in range(16) if i not in index]
    assert left_out and answers["without"] == f"Left out of the loss: {'; '.join(left_out)}."
    for token, row in enumerate(visible(batch.group.layout)):
        spans = re.findall(r"(\d+) to (\d+)", answers["sees"][token].partition(" sees ")[2])
        assert row.nonzero()[:, 0].tolist() == [i for start, end in spans for i in range(int(start), int(end) + 1)]


def test_images_are_restored_from_their_patches():
    frames = [torch.randn(count, 3, 28, 14 * side) for count, side in ((2, 1), (4, 3))]
    patches, grids = zip(*(patchify(some.numpy(), 7, 2, 2) for some in frames), strict=True)
    found = pictures(torch.cat([*map(torch.from_numpy, patches)]), torch.tensor(grids), ImageProcessor(patch_size=7))
    assert all(map(torch.equal, frames, found))


def test_large_matrices_are_shown_as_means_of_tiles():
    x = torch.tensor([[[1.0, 2.0], [float("nan"), 6.0]]])
    assert matrix(x)["stats"] == [3.0, 1.0, 6.0, 1] and matrix(x)["rows"][0] == [1.0, 2.0]
    for usual in (torch.randn(128, 20), torch.randn(1536), torch.arange(12_000).view(3, -1)):
        assert matrix(usual)["rows"] == (usual if usual.dim() > 1 else usual[None]).tolist()
    tiles = torch.arange(TILES_PER_SIDE**2, dtype=torch.float64).view(TILES_PER_SIDE, TILES_PER_SIDE)
    assert matrix(tiles.repeat_interleave(5, 0).repeat_interleave(4, 1))["rows"] == tiles.tolist()


def test_saliency_maps_are_derivatives_by_pixels(run_step):
    """The map sums a pixel's derivatives over colours and frames, here measured numerically."""
    _, trainer, step, *_ = run_step("grpo", False, "--model.dtype=float64")
    prompt, one = step.rollout.samples[0].prompt, step.rollout.samples[0].completion
    policy = trainer.policy
    pixels = prompt.pixel_values.double()
    slopes = []
    [shown] = saliency_maps(policy, trainer.processor, replace(prompt, pixel_values=pixels), one, -2.0)
    # the first patch's pixels
    for number in range(2, pixels.shape[1], trainer.processor.image_processor.patch_size**2):
        moved = torch.zeros_like(pixels)
        logps = []
        for moved[0, number] in (1e-5, -1e-5):
            group = pack([replace(prompt, pixel_values=pixels + moved)], [[one]], policy.config)
            logps.append(per_token_logps(policy, group)[0].sum().item())
        slopes.append(abs(logps[0] - logps[1]) / 2e-5)
    assert len(slopes) == 6 and shown[0, 2].item() == pytest.approx(2 * sum(slopes), rel=1e-4)


def test_the_page_in_docs_shows_the_current_code():
    """The code on the page is the current code, except for comments.

    If this test fails, run `python -m docs.scripts.make_pages`.
    """
    path = ROOT / "docs" / "step.html"
    page = Page(path)
    assert path.stat().st_size <= 1_600_000 and page.files
    now = {name: ast.dump(ast.parse((ROOT / "minivlmrl" / f"{name}.py").read_text())) for name in page.files}
    assert [name for name, text in page.files.items() if ast.dump(ast.parse(text)) != now[name]] == []
