"""Test environments that are classes, functions or lists of functions, and their error messages."""

import re
import textwrap

import PIL.Image
import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.data.chat_template import ChatTemplate, with_values
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Row
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.extras.agents import tool_sampler
from minivlmrl.extras.agents.environment import Settings, get_environment, tools_of, with_tools
from minivlmrl.extras.agents.tool_calls import answer_call
from minivlmrl.monitor.check.preflight import try_rewards
from minivlmrl.rewards.registry import get_reward
from minivlmrl.trainers.registry import find_trainers
from tests.helpers import tiny
from tests.helpers.links import ROOT
from tests.helpers.runs import metrics
from tests.helpers.talk import IMAGE_PART, text, user

OWN = '''
import datetime
import functools

class Counter:
    """An environment as for TRL's environment_factory, with reset, tools and a reward."""

    def __init__(self, start=0):
        self.count = start

    def reset(self, **kwargs) -> str | None:
        self.count = 0

    def add(self, step: int, times: int = 1) -> str:
        """Count.

        Args:
            step: by how much.
        """
        self.count += step * times
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count)

class Failing(Counter):
    def get_reward(self): return 1 / self.count

def double(number: float) -> float:
    "Double a number."
    return 2 * number

def shout(text: str) -> str:
    return text.upper()

def untyped(x) -> str: ...
async def later(x: int) -> str: ...
def each(x: int) -> str: yield "a"
def unnamed(x: int, /) -> str: ...
def many(*xs: int) -> str: ...
def odd(x: datetime.date) -> str: ...
class Refusing(Counter):
    def reset(self, prompt, images, extents, **columns): columns["answer"]

class Kinds(Counter):
    @functools.cache
    def cached(self, x: int) -> str: ...
    @classmethod
    def of_class(cls, x: int) -> str: ...
    @staticmethod
    def static(x: int) -> str: ...

class Empty: reset = lambda self, **columns: None
class Unset: look = lambda self: ""
class Endless(Counter): max_tool_calls = None

tools, number = [double, shout], 3
'''


@pytest.fixture
def from_file(tmp_path):
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN))
    return lambda name: get_environment(f"{tmp_path}/own.py:{name}")


def test_qwen2_5_vl_renders_a_list_of_tools_with_template_options(from_file, tmp_path):
    tokenizer = train_tokenizer(["a"], 300)
    for values in ({}, {"add_vision_id": True}):
        template = with_values(ChatTemplate(), values)
        made = with_tools(Processor(tokenizer, ImageProcessor(), template), f"{tmp_path}/own.py:tools")
        rendered = "".join(made.template.render([user([IMAGE_PART])]))
        assert '"name": "double", "description": "Double a number."' in rendered and made.tools == ("double", "shout")
        assert ("Picture 1: " in rendered) is bool(values)
        assert b"in tools" in tokenizer.files["chat_template.jinja"]


@pytest.mark.parametrize(("name", "rewards", "error"), [
    ("Counter", "{accuracy: 1}", r"sampling.environment \(.*own.py:Counter\) has a method get_reward"),
    ("double", "{environment: 1}", r"^rewards must contain environment if, and only if, "),
])  # fmt: skip
def test_get_reward_must_be_used(from_file, tmp_path, name, rewards, error):
    options = [f"--sampling.environment={tmp_path}/own.py:{name}", f"--rewards={rewards}"]
    with pytest.raises(ValueError, match=error):
        find_trainers(load_config(ROOT / "recipes" / "shapes.yaml", options))


def test_get_reward_is_a_reward(from_file):
    first, second = (from_file("Counter")() for _ in range(2))
    first.add(2, 3)
    assert get_reward("environment")(["a", "b"], environments=[first, second], turn_texts=[["a"], ["b"]]) == [6.0, 0.0]

    assert from_file("Counter(start=3)")().count == 3
    failing = from_file("Failing")()
    with pytest.raises(ValueError, match=r"^reward environment, for the completion 'a': ZeroDivisionError: "):
        get_reward("environment")(["a"], environments=[failing], turn_texts=[["a"]])


def test_a_reward_with_environments_is_tried_after_a_reset(from_file, tmp_path):
    """A reward with the argument `environments` has the signature of TRL's rewards."""
    (tmp_path / "r.py").write_text("def r(environments, **kwargs):\n    return [e.count for e in environments]\n")
    options = [f"--sampling.environment={tmp_path}/own.py:Counter(start=3)", f"--rewards={{{tmp_path}/r.py:r: 1}}"]
    config = load_config(ROOT / "recipes" / "shapes.yaml", options)
    try_rewards(config, {"grpo": [Row([user("?")], [], {"problem": "?"})]}, tiny.processor())
    config.sampling.environment = f"{tmp_path}/own.py:Refusing"
    try_rewards(config, {"grpo": [Row([user("?")], [], {"problem": "?", "answer": "4"})]}, tiny.processor())
    with pytest.raises(KeyError, match=r"^'answer'\nin the first row: sampling.environment .*own\.py:Refusing$"):
        try_rewards(config, {"grpo": [Row([user("?")], [], {"problem": "?"})]}, tiny.processor())


@pytest.mark.parametrize(("name", "error"), [
    ("untyped", "tool untyped: the argument 'x' must have a type hint and no / or"),
    ("later", "tool later: an async function or a generator returns no result"),
    ("each", "tool each: an async function or a generator returns no result"),
    ("unnamed", "tool unnamed: the argument 'x' must have a type hint and no / or"),
    ("many", "tool many: the argument 'xs' must have a type hint and no / or"),
    ("odd", "tool odd: JSON cannot represent the type hint <class 'datetime.date'>"),
    ("number", "expected a class, a function or a list of functions, but found 3"),
    ("Empty", r"an environment needs a method reset\(self, \*\*columns\) and at least one"),
    ("Unset", r"an environment needs a method reset\(self, \*\*columns\) and at least one"),
    ("Endless", "Endless: max_tool_calls is None, but it must be of type int"),
])  # fmt: skip
def test_invalid_environments_are_refused(from_file, name, error):
    with pytest.raises(ValueError, match=f"^sampling.environment .*own.py:{name}: {error}"):
        from_file(name)


def test_every_kind_of_method_is_a_tool(from_file):
    more = tools_of(from_file("Kinds")()).keys() - tools_of(from_file("Counter")()).keys()
    assert more == {"cached", "of_class", "static"}


def test_the_environment_of_the_docs(run, quick, checkpoint, rows, monkeypatch, tmp_path):
    page = (ROOT / "docs" / "agents.md").read_text()
    code = re.search(r"```python\n(# my_tools\.py.*?)```", page, re.DOTALL)[1]
    recipe = re.search(r"```yaml\n(# turn\.yaml.*?)```", page, re.DOTALL)[1]
    assert len((code + recipe).splitlines()) <= 40
    (tmp_path / "my_tools.py").write_text(code)
    environment = get_environment(f"{tmp_path}/my_tools.py:Turn")()
    assert environment.reset(images=[PIL.Image.new("RGB", (30, 60))], problem="?") is None
    processor = Processor(None, ImageProcessor())
    for name, message in (("turn", "90"), ("", '{"name": "turn", "arguments": {"degrees": 270}}')):
        [shown], [(picture, *_)], _ = answer_call(tools_of(environment), name, message, processor, Settings())
        assert shown["image"] is picture
    assert picture.size == (30, 60)  # rotated by 90 and by 270 degrees
    told = answer_call(tools_of(environment), "turn", "45", processor, Settings())
    assert told == ([text("error: turn by 90, 180 or 270 degrees")], [], False)
    monkeypatch.chdir(tmp_path)
    for name, words in (("turn.yaml", recipe), ("train.jsonl", rows.read_text())):
        (tmp_path / name).write_text(words.replace('"image": "', f'"image": "{rows.parent}/'))
    # pretend that every text contains a call
    monkeypatch.setattr(tool_sampler, "token_bytes", lambda *_: b"<turn></turn>")
    monkeypatch.setattr(tool_sampler, "find_calls", lambda text, tools, ended: [("turn", "90")] * (not ended))
    options = ["--model.compute_dtype=float32", "--sampling.max_new_tokens=16"]
    options += ["--grpo.max_steps=1", "--grpo.prompts_per_step=1"]
    trained = run(f"--model.path={checkpoint}", *options, recipe=tmp_path / "turn.yaml")
    assert metrics(trained)[0]["rewards/environment/mean"] > 0.8
