"""Messages and their parts, as the tests of rows write them."""

import pytest

IMAGE_PART = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


def renders_as_transformers(template, messages):
    """Assert that a ChatTemplate writes what apply_chat_template writes."""
    pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    from transformers.utils.chat_template_utils import render_jinja_template

    for prompt in (True, False):
        (theirs,), _ = render_jinja_template(
            [messages], chat_template=template.text, add_generation_prompt=prompt, **template.token_names
        )
        assert "".join(template.render(messages, add_generation_prompt=prompt)) == theirs
