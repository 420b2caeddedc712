"""The page of a step, line by line: what it shows is what the step made, and looking changes nothing."""

import ast
import json
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from test_replay import LOUD, SAME, replayed  # noqa: F401 (a fixture)

from benchmarks import house
from minivlmrl import train
from minivlmrl.attention import visible
from minivlmrl.batch import pack
from minivlmrl.image import ImageProcessor, patchify
from minivlmrl.logprobs import per_token_logps
from minivlmrl.run.config import load_config
from minivlmrl.tools.lines import Film, looked, matrix, pictures
from minivlmrl.tools.replay import go_to


class Page:
    """What a page's script reads."""

    def __init__(self, path):
        text = path.read_text("utf-8")
        assert not re.search(r'(src|href)="(?!#|\$|data:)', text), "one file, no network"
        [data] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
        self.__dict__ |= json.loads(data)

    def made(self, name, function=None):
        """Each value of a name, in order; of calls of one function alone."""
        for _, call, _, made, *_ in self.events:
            if function in (None, self.calls[call][1]):
                yield from (self.values[value] for _, what, value in made if what == name)


@pytest.fixture
def film(home, tmp_path, lively, plain):
    """film(stage, words): a step recorded and, if words are not None, its page; algorithm, Step, metrics, weights."""

    def film(stage, words=None, *overrides):
        options = [f"--output_dir={tmp_path / 'none'}", f"--stages=[{stage}]", *LOUD, *overrides]
        one = Film(words, stage, 1) if words is not None else None
        algorithm, optimizer, step, _ = go_to(load_config(home / "recipe.yaml", options), stage, 1, one)
        with one or nullcontext():
            metrics = train.optimizer_step(algorithm, step, optimizer, 1)
        if one:
            one.write(tmp_path / "step.html", "a step")
        page = Page(tmp_path / "step.html") if one else None
        return page, algorithm, step, metrics, [x.detach().clone() for x in algorithm.trained.parameters()]

    return film


@pytest.mark.parametrize("stage", ["sft", "dpo", "grpo", "ppo"])
def test_a_film_changes_no_byte_of_the_step(stage, film):
    _, _, _, metrics, weights = film(stage)
    page, _, _, filmed, theirs = film(stage, [])
    assert filmed == metrics and all(map(torch.equal, weights, theirs))
    order, names = list(page.files), {call[0] for call in page.calls}
    assert order[0] == "train" and set(order) == names
    assert stage == "ppo" or order.index("image") < order.index("decoder"), "ppo goes on with a rollout"
    assert all(page.files[name] == (house.PACKAGE / f"{name}.py").read_text() for name in order)
    _, norms, *_, last = page.made("norms of gradients")  # none before backward, none after zero_grad
    total = sum(value**2 for _, value in norms["items"]) ** 0.5
    assert last["items"] == [] and total == pytest.approx(metrics["grad_norm"], rel=1e-3)
    assert page.events[-1][0] == "r" and page.calls[page.events[-1][1]][1] == "optimizer_step"


def test_replay_writes_it_and_says_that_the_files_agree(run, plain, lively, replayed, tmp_path):  # noqa: F811
    folder = run("--stages=[grpo]", *LOUD)
    mine = tmp_path / "mine.py"
    code, lines = replayed(folder, None, 2, f"--lines={tmp_path / 'step.html'},algorithms,{mine}")
    assert code == 2 and lines[-1].endswith(f"{mine} is no Python file, and no folder of minivlmrl")
    code, lines = replayed(folder, None, 2, f"--lines={tmp_path / 'step.html'},algorithms,{__file__}")
    assert (code, lines[-2:]) == (0, SAME) and f"wrote {tmp_path / 'step.html'}" in lines
    page = Page(tmp_path / "step.html")
    assert ["algorithms/grpo_stage", "GRPOStage.metrics"] in [call[:2] for call in page.calls]


def test_questions_that_the_page_answers(film):
    page, algorithm, step, *_ = film("grpo", [], "--grpo.max_steps=2")
    [batch], [run] = step.micro_batches, page.runs
    decode = algorithm.processor.tokenizer.decode
    assert [page.words[str(i)] for i in run["ids"]] == [decode([i]) for i in batch.group.input_ids.tolist()]
    assert run["sees"] == visible(batch.group.layout).int().tolist()
    *_, advantages = page.made("advantages", "grpo_loss")
    assert [x for [x] in advantages["rows"]] == pytest.approx(batch.advantages.tolist(), rel=1e-3)
    [ratio] = page.made("ratio", "grpo_loss")
    assert ratio["shape"] == list(batch.loss_mask.shape) and ratio["stats"] == [1.0, 1.0, 1.0, 0]
    assert ratio["rows"] == torch.ones(*ratio["shape"]).tolist()
    drawn = step.rollout.completions[0]
    for said, completion in zip(page.prompts[0]["completions"], drawn, strict=True):
        assert [logp for _, logp in said["tokens"]] == pytest.approx(completion.logps.tolist(), rel=1e-3)
    rounds = [n for call, _, name, n in page.more if page.calls[call][1] == "generate" and not name]
    assert 2 + max(rounds) == max(len(c.ids) for group in step.rollout.completions for c in group)
    assert sum(len(value["pictures"]) for value in page.made("pixel_values", "VisionTransformer.forward")) >= 4


def test_pictures_come_back_from_their_patches():
    images = ImageProcessor(patch_size=7)
    frames = [torch.randn(count, 3, 28, 14 * side) for count, side in ((2, 1), (4, 3))]
    patches, grids = zip(*(patchify(some.numpy(), 7, 2, 2) for some in frames), strict=True)
    found = pictures(torch.cat([*map(torch.from_numpy, patches)]), torch.tensor(grids), images)
    assert all(map(torch.equal, frames, found))


def test_a_matrix_says_where_it_is_not_a_number():
    x = torch.arange(12.0).view(1, 3, 4)
    x[0, 2, 3] = float("nan")
    shown = matrix(x, 4)
    assert shown["stats"] == (5.0, 0.0, 10.0, 1) and shown["rows"][1] == [4.0, 5.0, 6.0, 7.0]
    assert matrix(torch.arange(64.0).view(8, 8), 2)["rows"] == [[13.5, 17.5], [45.5, 49.5]]


def test_where_the_reward_looked_is_what_a_pixel_changes(film):
    """The map adds up the derivatives, which are measured here, of a pixel's colours in both frames."""
    _, algorithm, step, *_ = film("grpo", None, "--model.dtype=float64")
    prompt, one = step.rollout.prompts[0], step.rollout.completions[0][0]
    prompt = replace(prompt, pixel_values=prompt.pixel_values.double())
    [[shown], [twice]] = (looked(algorithm.policy, algorithm.processor, prompt, one, weight) for weight in (1.0, -2.0))
    torch.testing.assert_close(twice, 2 * shown)

    def logp(moved):
        group = pack([replace(prompt, pixel_values=prompt.pixel_values + moved)], [[one]], algorithm.policy.config)
        return per_token_logps(algorithm.policy, group)[0].sum().item()

    side, slopes = algorithm.processor.image_processor.patch_size, 0.0
    moved = torch.zeros_like(prompt.pixel_values)
    for number in range(2, moved.shape[1], side**2):  # the third pixel of the first patch
        moved[0, number] = 1e-5
        slopes += abs(logp(moved) - logp(-moved)) / 2e-5
        moved[0, number] = 0
    assert shown[0, 2].item() == pytest.approx(slopes, rel=1e-4)


def test_the_page_in_docs_shows_the_book_as_it_is():
    """But for comments and docstrings. If this fails, python -m docs.make_pages writes it again."""
    path = house.ROOT / "docs" / "step.html"
    page = Page(path)
    assert path.stat().st_size <= 1_500_000 and {call[0] for call in page.calls} == set(house.READING_ORDER)
    assert [n for n in page.files if code_of(page.files[n]) != code_of((house.PACKAGE / f"{n}.py").read_text())] == []


def code_of(text):
    """A file's code."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if getattr(node, "body", None) and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = node.body[bool(ast.get_docstring(node)) :]
    return ast.dump(tree)
