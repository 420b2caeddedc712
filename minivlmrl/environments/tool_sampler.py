"""Completions that call tools: an answer's tokens are forced, one at each decode step of the batch.

Draws still go by key; what is trained on are the ids, positions and patches of here.
"""

import re
from collections import deque
from itertools import chain

import torch
from torch import Tensor

from minivlmrl.chat import IMAGE
from minivlmrl.data.boxes import extent
from minivlmrl.decoder import place_images
from minivlmrl.environments.environment import copied, get_environment, settings_of, tools_of
from minivlmrl.environments.tool_calls import answer, find_calls, lay_out, turn_opening
from minivlmrl.generate import Choose, Decode
from minivlmrl.hub.checker import naming
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.reward_functions.names import guarded
from minivlmrl.rope import get_rope_index
from minivlmrl.rows import Completion, Prompt
from minivlmrl.sampling.sample import RunSampler
from minivlmrl.sampling.stop_strings import NO_TEXT, token_bytes


def build_sampler(model, processor, sampling, *rest, **options) -> RunSampler:
    """Make the sampler of a recipe, with tools if it names an environment."""
    kind = ToolSampler if sampling.environment else RunSampler
    return kind(model, processor, sampling, *rest, **options)


class Play:
    """One completion while it is written."""

    def __init__(self, environment: object):
        self.environment, self.tools = environment, tools_of(environment)
        self.settings, self.called, self.failed = settings_of(environment), 0, 0
        self.closing = re.compile(
            f"</({'|'.join(self.tools)})>".encode()
        )  # longer than what it finds
        self.text = b""  # since the last answer
        self.written, self.pictures, self.cut, self.ended = [], [], False, False
        self.shift, self.moved = 0, [0] * 3  # position, less the tokens before it: next and last
        self.queue = deque()  # forced tokens that are not read yet: id, moved
        self.unseen, self.embeds = [], deque()  # pictures, and what the tower made of them

    def step(self, drawn: tuple, left: int, sampler: "ToolSampler") -> tuple[int, float, bool]:
        """Take a drawn token (id, logp, whether it ends) or a forced one; `left` can follow."""
        self.written.append(not self.queue)
        if self.queue:
            token, self.moved = self.queue.popleft()
            return token, 0.0, False
        token, logp, ends = drawn
        self.moved = [self.shift] * 3
        before = max(0, len(self.text) - len(self.closing.pattern))
        self.text += token_bytes(sampler.processor.tokenizer, token, NO_TEXT)
        calls = []
        if ends or self.closing.search(self.text, before):
            calls = find_calls(self.text.decode(errors="replace"), self.tools, ends)
            calls = calls[: self.settings.max_tool_calls - self.called]
        self.ended = self.answer(calls, ends, left, sampler) if calls else ends
        return token, logp, self.ended

    def answer(self, calls: list, ended: bool, left: int, sampler: "ToolSampler") -> bool:
        """Queue the answers of calls; True: they do not fit, and the row ends."""
        processor = sampler.processor
        answers = [answer(self.tools, *one, processor, self.settings) for one in calls]
        self.called += len(calls)
        self.failed += sum(not done for *_, done in answers)
        pictures = [picture for _, shown, _ in answers for picture in shown]
        grids = [grid for *_, grid in pictures]
        opening = turn_opening(processor) if ended else ()
        pieces = processor.encode(lay_out([parts for parts, *_ in answers], opening), grids)
        ids = torch.tensor([*chain(*pieces)])
        self.cut = len(ids) >= left  # a picture is never cut, and something has to follow
        if not self.cut:
            position = get_rope_index(ids, torch.tensor(grids), sampler.model.config)  # (3, n)
            moved = position - torch.arange(len(ids)) + self.shift
            self.queue.extend(zip(ids.tolist(), moved.T.tolist(), strict=True))
            self.shift += int(position.max()) + 1 - len(ids)
            self.text = b""
            self.pictures += pictures
            self.unseen += pictures
        return self.cut


class ToolDecode(Decode):
    """A decode step that shows a picture where its tokens are forced; plays: of all rows."""

    def __init__(self, image_token: int, plays: list[Play]):
        self.image_token, self.plays = image_token, plays

    def __call__(self, model, ids: Tensor, attention) -> Tensor:
        plays, device = [play for play in self.plays if not play.ended], ids.device
        asked = [(play, picture) for play in plays for picture in play.unseen]
        if asked:
            _, patches, grids = zip(*(picture for _, picture in asked), strict=True)
            embeds = model.visual(to_device(torch.cat(patches), device), torch.tensor(grids))
            merge = model.config.vision_config.spatial_merge_size**2
            embeds = embeds.split([len(picture) // merge for picture in patches])
            for (play, _), tokens in zip(asked, embeds, strict=True):
                play.embeds.extend(tokens)
                play.unseen = []
        shows = [i for i, token in enumerate(ids.tolist()) if token == self.image_token]
        shows = [i for i in shows if not plays[i].written[-1]]
        index = to_device(torch.tensor(shows, dtype=torch.long), device)
        x, deep = model.model.embed_tokens(ids), []
        if shows:
            shown = torch.stack([plays[i].embeds.popleft() for i in shows])
            x, deep = place_images(x, shown, index)
        moved = to_device(torch.tensor([play.moved for play in plays]).T, device)  # (3, r)
        hidden = model.model(
            x, attention.start + attention.newest + moved, attention, None, index, deep
        )
        return float32_matmul(hidden, model.lm_head.weight.T)


class ToolSampler(RunSampler):
    """Draws completions that may call the tools of the environment of `sampling`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.make = get_environment(self.sampling.environment)
        if self.sampling.stop_strings or not self.gather_weights:
            refused = "leave out sampling.stop_strings, rollout.gather_weights: false"
            raise ValueError(f"sampling.environment: {refused}")

    def chooser(self, prompts, num_generations, keys) -> Choose:
        self.plays = [play for prompt in prompts for play in self.begin(prompt, num_generations)]
        return super().chooser(prompts, num_generations, keys)

    def generate(self, prompts, num_generations, choose) -> list[list[Completion]]:
        groups = super().generate(prompts, num_generations, choose)
        for play, completion in zip(self.plays, chain(*groups), strict=True):
            completion.written, completion.pictures = torch.tensor(play.written), play.pictures
            completion.stopped &= not play.cut
            completion.environment = play.environment
            completion.calls = play.called, play.failed, play.cut
        return groups

    def begin(self, prompt: Prompt, count: int) -> list[Play]:
        """Tell as many environments of the row of a prompt."""
        if prompt.row is None:
            raise ValueError("environments are told a prompt's row: make it with Row.prompt")
        row, patch = prompt.row, self.processor.image_processor.patch_size
        grids = prompt.image_grid_thw[prompt.second_per_grid_ts == 0].tolist()
        space = row.columns.get("box_space") or self.processor.box_space
        images = list(row.images)  # they may be decoded only now
        resized = [(patch * w, patch * h) for _, h, w in grids]
        extents = [extent(space, *of) for of in zip((i.size for i in images), resized, strict=True)]
        columns = row.columns | {"images": images, "extents": extents, "prompt": row.messages}
        where = row.where or f"row {row.index}"
        with naming(f"{where}: sampling.environment {self.sampling.environment}"):
            plays = [Play(guarded("__init__", self.make)) for _ in range(count)]
            for play in plays:
                reset = play.environment.reset
                if (text := guarded("reset", reset, **copied(columns))) is not None:
                    raise ValueError(f"reset returned {text!r:.40}; put it into the row's prompt")
        return plays

    def decode(self) -> Decode:
        return ToolDecode(self.processor.tokenizer.special_tokens[IMAGE], self.plays)

    def forcing(self, choose: Choose) -> Choose:
        def force(logits: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            drawn = zip(*(x.tolist() for x in choose(logits, rows, counts)), strict=True)
            plays = zip(rows.tolist(), drawn, counts.tolist(), strict=True)
            most = self.sampling.max_new_tokens - 1
            now = [self.plays[row].step(token, most - n, self) for row, token, n in plays]
            return tuple(to_device(torch.tensor(x), rows.device) for x in zip(*now, strict=True))

        return force
