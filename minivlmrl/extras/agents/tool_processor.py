"""Format demonstrations with tool calls such as <zoom>1, 2</zoom>."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from minivlmrl.data.messages import content_parts, is_trained, part_kind, text_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.tokenizer import SpecialToken
from minivlmrl.errors import UserError


@dataclass
class ToolProcessor(Processor):
    tools: Sequence[str] = ()

    def join_turns(self, turns: list[dict]) -> list[dict]:
        """Merge results of calls such as <search>cats</search> into the assistant turn as <result>...</result>."""
        joined = []
        is_answered = False
        closing_tags = tuple(f"</{name}>" for name in self.tools)
        for turn in turns:
            parts = content_parts(turn)
            continues = is_answered and turn["role"] == "assistant"
            is_answered = False
            if turn["role"] == "tool" and joined:
                is_answered = text_of(joined[-1]).rstrip().endswith(closing_tags)
            if is_answered:
                parts = [
                    {"text": f"<result>{part['text']}</result>"} if part_kind(part) == "text" else part
                    for part in parts
                    if part.get("text") != ""
                ]
            if continues and is_trained(turn) != is_trained(joined[-1]):
                raise UserError(
                    "the result of a tool that is called in tags is part of an assistant turn, but only one of the "
                    "assistant turns before and after the result has a loss; train on both turns or on neither"
                )
            if is_answered or continues:
                joined[-1] = joined[-1] | {"content": [*content_parts(joined[-1]), *parts]}
            else:
                joined.append(turn)
        return joined

    def mark_results(self, pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
        """Exclude <result>...</result> after a tag such as </zoom> from the text to train on."""
        tag_ends = "|".join(["^", *(f"(?<=</{name}>)" for name in ("result", *self.tools))])
        answer = re.compile(rf"((?:{tag_ends})\s*<result>.*?</result>)", re.DOTALL)
        cut_pieces = []
        for piece, is_written in pieces:
            is_text = self.tools and not isinstance(piece, SpecialToken)
            for i, text in enumerate(answer.split(piece) if is_text else [piece]):
                if text:  # re.split returns tool results at odd indices
                    cut_pieces.append((text, is_written and i % 2 == 0))
        return cut_pieces
