"""The sandbox in which a folder's chat template runs, with what transformers gives to templates."""

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment


def environment() -> ImmutableSandboxedEnvironment:
    """Make an environment as apply_chat_template has it: whitespace rules, functions, {% break %}, {% generation %}.

    It keeps a template from Python's insides, from files, and from range() over 100,000. It does not bound time or
    memory ({{ 'x' * 10**9 }} is possible): take a template from where you would take weights.
    """
    extensions = [GenerationBlock, LoopControlExtension]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class GenerationBlock(Extension):
    """{% generation %}...{% endgeneration %}: its text between the variables generation_begins and generation_ends."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(f"generation_{name}", "load")]) for name in ("begins", "ends"))
        return nodes.Scope([begin, *body, end]).set_lineno(line, override=False)


def plain(value: Any) -> Any:
    """Rebuild a value from JSON types alone: the image object in a part has methods that no sandbox knows."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return None if value is None else f"<{type(value).__name__}>"


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Write JSON; jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
