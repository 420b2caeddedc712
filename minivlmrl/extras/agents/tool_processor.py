"""Format SFT demonstrations that contain tool calls such as <zoom>1, 2</zoom>."""

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
        """Move tool results into the assistant turn that called the tool, in <result> tags.

        Results move only if the call is in tags, such as <search>cats</search>.
        """
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
                parts = [in_result_tags(part) for part in parts if part.get("text") != ""]
            if continues and is_trained(turn) != is_trained(joined[-1]):
                raise UserError(
                    "the result of a tool that is called in tags is part of an assistant turn, but only one of the "
                    "assistant turns before and after the result has a loss; train on both turns or on neither"
                )
            if is_answered or continues:
                content = [*content_parts(joined[-1]), *parts]
                joined[-1] = joined[-1] | {"content": content}
            else:
                joined.append(turn)
        return joined

    def mark_results(self, pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
        """Exclude tool results from the loss: <result>...</result> after a tag such as </zoom>."""
        tag_ends = "|".join(["^", *(f"(?<=</{name}>)" for name in ("result", *self.tools))])
        answer = re.compile(rf"((?:{tag_ends})\s*<result>.*?</result>)", re.DOTALL)
        cut_pieces = []
        for piece, is_written in pieces:
            is_text = self.tools and not isinstance(piece, SpecialToken)
            texts = answer.split(piece) if is_text else [piece]
            for i, text in enumerate(texts):
                is_answer = i % 2 == 1  # re.split returns matches at odd indices
                if text:
                    cut_pieces.append((text, is_written and not is_answer))
        return cut_pieces


def in_result_tags(part: dict) -> dict:
    """Put a tool result's text in <result> tags; return images unchanged."""
    if part_kind(part) != "text":
        return part
    return {"text": f"<result>{part['text']}</result>"}
