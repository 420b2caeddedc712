"""Write the papers in minivlmrl/config/methods.py into the table of methods in docs/policy_gradients.md."""

import re

from docs.scripts.picture import DOCS
from minivlmrl.config.methods import METHODS


def page() -> str:
    """Return policy_gradients.md with a link to the paper of each method in METHODS."""
    text = (DOCS / "policy_gradients.md").read_text(encoding="utf-8")
    for name, method in METHODS.items():
        title = f"[{method.title}](papers/{method.page}.md)" if method.page else method.title
        cell = f"`--method={name}` ([{method.paper}](https://arxiv.org/abs/{method.paper}))"
        row = re.compile(rf"^\| {re.escape(title)} \|(.*)\| [^|]+ \|$", re.MULTILINE)
        if len(row.findall(text)) != 1:
            raise ValueError(f"docs/policy_gradients.md needs one row {title}")
        text = row.sub(lambda match: f"| {title} |{match[1]}| {cell} |", text)  # noqa: B023 (called at once)
    return text
