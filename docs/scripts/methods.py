"""Write the options of minivlmrl/config/methods.py into the table of methods in docs/policy_gradients.md."""

import re

from docs.scripts.picture import DOCS
from minivlmrl.config.methods import METHODS


def page() -> str:
    """Return policy_gradients.md with papers and options from METHODS."""
    text = (DOCS / "policy_gradients.md").read_text(encoding="utf-8")
    for name, method in METHODS.items():
        title = f"[{method.title}](papers/{method.page}.md)" if method.page else method.title
        options = [f"`{option}: {value}`" for option, value in method.options.items()]
        paper = f"[{method.paper}](https://arxiv.org/abs/{method.paper})"
        cell = f"`--method={name}` ({paper}): {', '.join(options)}"
        row = re.compile(rf"^\| {re.escape(title)} \|(.*)\| [^|]+ \|$", re.MULTILINE)
        if len(row.findall(text)) != 1:
            raise ValueError(f"docs/policy_gradients.md needs one row {title}")
        text = row.sub(lambda match: f"| {title} |{match[1]}| {cell} |", text)  # noqa: B023 (called at once)
    return text
