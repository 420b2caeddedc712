"""Short functions for messages, parts of messages and a chat template in row tests."""

import pytest

IMAGE_PART = {"type": "image"}
# template similar to Qwen's: strips texts, supports images, writes a newline after a turn
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text | trim }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


def renders_as_transformers(template, messages):
    """Assert that a ChatTemplate renders messages like apply_chat_template in transformers."""
    pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {"chat_template": template.text, "add_generation_prompt": True, **template.token_names}
    (theirs,), _ = render_jinja_template([messages], **given)
    assert "".join(template.render(messages)) == theirs
