"""Completions that call tools: what these answer is read in one forward, then decoding goes on.

Draws still go by key; what is trained on are the ids, positions and patches of here.
"""

import re
from copy import deepcopy
from itertools import chain

import torch
from PIL.Image import Image
from torch import Tensor

from minivlmrl.attention import DecodeAttention
from minivlmrl.batch import pack
from minivlmrl.data.boxes import extent
from minivlmrl.environments.environment import get_environment, settings_of, tools_of
from minivlmrl.environments.tool_calls import answer, find_calls, lay_out, turn_opening
from minivlmrl.generate import Choose, Decode
from minivlmrl.hub.recipe_values import naming
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import dense_attention
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.reward_functions.names import guarded
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
        self.environment = environment
        self.tools = tools_of(environment)
        self.settings = settings_of(environment)
        self.called = self.failed = 0  # tools
        # longer than what it finds
        self.closing = re.compile(f"</({'|'.join(self.tools)})>".encode())
        self.text = b""  # since the last answer
        # of all tokens
        self.ids = []
        self.written = []
        self.pictures = []
        self.unread = []  # an answer that is not read yet
        self.cut = self.ended = False

    def step(self, token: int, turn_ends: bool, text_ends: bool, sampler: "ToolSampler") -> bool:
        """Take a drawn token, with which a turn ends or a stop string; say whether the row ends."""
        if self.ended:  # it runs on until `generate` drops rows
            return True
        self.written.append(True)
        self.ids.append(token)
        left = sampler.sampling.max_new_tokens - len(self.written)
        before = max(0, len(self.text) - len(self.closing.pattern))
        self.text += token_bytes(sampler.processor.tokenizer, token, NO_TEXT)
        calls = []
        ends = turn_ends or text_ends
        if not text_ends and (ends or self.closing.search(self.text, before)):
            calls = find_calls(self.text.decode(errors="replace"), self.tools, ends)
            calls = calls[: self.settings.max_tool_calls - self.called]
        ends = self.answer(calls, ends, left, sampler) if calls else ends
        self.ended = ends or left == 0
        return ends

    def answer(self, calls: list, ended: bool, left: int, sampler: "ToolSampler") -> bool:
        """Answer calls; True: the answers do not fit, and the row ends."""
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
            patches = [torch.zeros(0, processor.image_processor.patch_dim)]
            patches += [patches for _, patches, _ in pictures]
            grids = torch.tensor(grids, dtype=torch.long).view(-1, 3)
            self.unread.append(Prompt(ids, torch.cat(patches), grids))
            self.written += [False] * len(ids)
            self.ids += ids.tolist()
            self.pictures += pictures
            self.text = b""
        return self.cut

    def insert_answers(self, completion: Completion):
        """Put what was answered between the drawn tokens of a completion."""
        written = completion.written = torch.tensor(self.written)
        completion.ids = torch.tensor(self.ids)
        completion.pictures = self.pictures
        completion.logps = torch.zeros(len(written)).masked_scatter(written, completion.logps)
        if completion.sampling_mask:
            counts, kept = completion.sampling_mask
            completion.sampling_mask = written.long().masked_scatter(written, counts), kept


def shared(image: Image) -> Image:
    """Return the same picture, whose pixels are copied when somebody writes to it."""
    image.load()
    image = image._new(image.im)
    image.readonly = 1
    return image


class AnswerAttention(DecodeAttention):
    """The attention of answers: tokens that some rows of a decoding read at once, end to end.

    They attend to their row's prompt, to its own tokens and causally to themselves, and are own
    tokens of their row then.
    """

    def __init__(self, decoding: DecodeAttention, rows: list[int], counts: list[int]):
        self.decoding, self.memory = decoding, decoding.memory
        lengths = (decoding.prompt_bias == 0).sum(1).tolist()
        newest = decoding.newest.tolist()
        added = [0] * len(newest)
        longest = max(newest)
        self.spans = []
        self.keys = []
        end = 0
        for row, count in zip(rows, counts, strict=True):
            self.spans.append((slice(row, row + 1), slice(end, end + count)))
            end += count
            prompt = int(decoding.prompt_index[row])
            before = newest[row] + 1
            # the prompt and its tokens, own tokens before and after
            self.keys.append((prompt, lengths[prompt], before, before + count))
            added[row] = count
            longest = max(longest, newest[row] + count)
        tokens = to_device(torch.tensor(added), decoding.device)
        decoding.advance(tokens, longest - max(newest))

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = self.decoding.row_kv[layer_index]
        shared = self.decoding.prompt_kv[layer_index]
        out = []
        for (row, tokens), known in zip(self.spans, self.keys, strict=True):
            (prompt, length, before, after) = known
            keys = []
            for of_rows, of_prompts, new in zip(own, shared, (k, v), strict=True):
                of_rows[row, :, before:after] = new[tokens].transpose(0, 1)
                seen = of_prompts[prompt : prompt + 1, :, :length]
                keys.append(torch.cat([seen, of_rows[row, :, :after]], dim=2))
            queries = q[tokens].transpose(0, 1)[None]  # (1, H, tokens, D)
            out.append(dense_attention(queries, *keys, is_causal=True)[0].transpose(0, 1))
        return torch.cat(out)


class ReadingDecode(Decode):
    """A decode step, after which rows read what their tools have answered, in one forward."""

    def __init__(self, decode: Decode, sampler: "ToolSampler"):
        self.decode, self.sampler = decode, sampler
        self.attention_type = decode.attention_type

    def __call__(self, model, ids: Tensor, attention: DecodeAttention) -> Tensor:
        logits = self.decode(model, ids, attention)
        device = attention.device
        plays = [self.sampler.plays[row] for row in attention.rows.tolist()]
        rows = [i for i, play in enumerate(plays) if play.unread]
        if not rows:
            return logits
        answers = [plays[i].unread.pop() for i in rows]
        batch = pack(answers, [[] for _ in answers], model.config, device)
        counts, last = batch.layout.prompt_lengths, batch.layout.last_index
        index, lengths = (to_device(torch.tensor(x), device) for x in (rows, counts))
        start = attention.start[index] + attention.newest[index] + 1
        batch.position_ids += start.repeat_interleave(lengths)
        hidden = model(batch, AnswerAttention(attention, rows, counts), last)
        ends = torch.stack([p.max() for p in batch.position_ids.split(counts, dim=1)])
        attention.start[index] = ends - attention.newest[index]  # pictures are few positions wide
        self.sampler.hear(attention.rows[index].repeat_interleave(lengths), batch.input_ids)
        logits[index] = float32_matmul(hidden, model.lm_head.weight.T)
        return logits


class ToolSampler(RunSampler):
    """Draws completions that may call the tools of the environment of `sampling`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.make = get_environment(self.sampling.environment)
        if not self.gather_weights:  # ranks read their answers at different steps
            raise ValueError("sampling.environment: leave out rollout.gather_weights: false")

    def chooser(self, prompts, num_generations, keys) -> Choose:
        self.plays = [play for prompt in prompts for play in self.begin(prompt, num_generations)]
        return super().chooser(prompts, num_generations, keys)

    def sample_with(self, prompts, num_generations, choose) -> list[list[Completion]]:
        groups = super().sample_with(prompts, num_generations, choose)
        for play, completion in zip(self.plays, chain(*groups), strict=True):
            play.insert_answers(completion)
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
                own = {id(image): shared(image) for image in images}
                if (text := guarded("reset", reset, **deepcopy(columns, own))) is not None:
                    raise ValueError(f"reset returned {text!r:.40}; put it into the row's prompt")
        return plays

    def decode(self) -> Decode:
        return ReadingDecode(super().decode(), self)

    def telling(self, choose: Choose) -> Choose:
        def choose_and_call(logits: Tensor, rows: Tensor, counts: Tensor):
            ids, logps, ends = choose(logits, rows, counts)
            drawn = (x.tolist() for x in (rows, ids, ends, self.hear(rows, ids)))
            ended = [self.plays[row].step(*of, self) for row, *of in zip(*drawn, strict=True)]
            return ids, logps, to_device(torch.tensor(ended), rows.device)

        return choose_and_call
