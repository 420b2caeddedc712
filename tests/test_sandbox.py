"""What a chat template can do in its sandbox, and what happens when it fails."""

import copy
import json

import pytest
from talk import renders_as_transformers

from minivlmrl.data.template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend\n",
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "{{ messages | tojson }}{{ tools | tojson }}{{ documents is none }}{{ missing }}{{ eos_token }}",
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}|{{ strftime_now('%Y') }}",
        "{% macro f(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{{ f(messages[0]) }}",
        "{{ namespace(a=1).a }}{{ dict(b=2) }}{{ range(3) | list }}{{ [1, 2] | join('-') }}",
        "{% set content = messages[0].content %}{{ content.split('</think>')[-1] }}{{ '<think>' in content }}",
    ],
)
def test_what_a_template_can_do_is_what_it_can_do_in_transformers(text):
    pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    template = ChatTemplate(text, "t", token_names={"eos_token": "<|im_end|>"})
    renders_as_transformers(template, [{"role": "user", "content": "<think>é<|im_end|></think> hi & ho "}, *HI])


def test_the_template_sees_plain_data_and_changes_nothing():
    class Picture:
        def __str__(self):
            raise AssertionError("the template got the object itself")

    messages = user(
        {"type": "image", "image": Picture(), "max_pixels": 3.5, "text": None}, {"text": "hi", "image": None}
    )
    before = copy.deepcopy(messages)
    text = "{{ messages[0].content | tojson }}<|image_pad|>"
    assert json.loads(ChatTemplate(text, "t").render(messages)[0]) == [
        {"type": "image", "image": "<Picture>", "max_pixels": 3.5},
        {"text": "hi"},
    ]
    del before[0]["content"][0]["image"], messages[0]["content"][0]["image"]
    assert messages == before


BROKEN = {
    "syntax": ("\n{% if %}", "line 2: TemplateSyntaxError: Expected an expression"),
    "no end": ("{% generation %}", "line 1: TemplateSyntaxError"),
    "no such filter": ("a\nb{{ 1 | nonsense }}", "line 2: TemplateAssertionError: No filter named 'nonsense'"),
    "no such variable": ("a\n{{ a.b.c }}", "line 2: UndefinedError: 'a' is undefined"),
    "its own objection": ("\n\n{{ raise_exception('roles must alternate') }}", "line 3: TemplateError: roles must alt"),
    "types": ("{{ 'a' + messages }}", "line 1: TypeError"),
    "Python's insides": ("{{ ''.__class__.__mro__ }}", "line 1: SecurityError"),
    "the caller's list": ("{{ messages.append(1) }}", "line 1: SecurityError"),
    "a long loop": ("{% for i in range(10**9) %}{% endfor %}", "line 1: OverflowError: Range too big"),
    "in a macro": ("{% macro f() %}\n{{ a.b }}{% endmacro %}\n\n{{ f() }}", "line 2: UndefinedError"),
    "another file": ("{% include '/etc/passwd' %}", "line 1: TypeError: no loader"),
    "endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "line 1: RecursionError"),
    "deep nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    "wide nesting": ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "SyntaxError: too many statically nested"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_fails_is_named_with_its_line(name):
    text, error = BROKEN[name]
    with pytest.raises(ValueError, match=rf"^folder/t\.jinja: chat template fails( in)?:? .*{error}"):
        ChatTemplate(text, "folder/t.jinja").render(HI)
