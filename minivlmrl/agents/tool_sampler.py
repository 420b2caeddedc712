"""Completions that call tools: what these answer is read in one forward, then decoding goes on.

Draws still go by key; what is trained on are the ids, positions and patches of here.
"""

import re
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain

import torch
from PIL.Image import Image
from torch import Tensor

from minivlmrl.agents.environment import get_environment, settings_of, tools_of
from minivlmrl.agents.tool_calls import answer, begin, find_calls, lay_out, turn_opening
from minivlmrl.config.parsing import naming
from minivlmrl.data.boxes import extent
from minivlmrl.data.rows import Completion, Processor, Prompt
from minivlmrl.generation.generate import Decode, TokenSampler
from minivlmrl.generation.sampler import Sampler
from minivlmrl.generation.stop_strings import NO_TEXT, token_bytes
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import dense_attention
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.model.attention import DecodeAttention
from minivlmrl.model.packing import pack


class Play:
    """One completion while it is written; prompt: of its row."""

    def __init__(self, environment: object, prompt: Prompt | None = None):
        self.environment = environment
        self.prompt = prompt
        self.tools = tools_of(environment)
        self.settings = settings_of(environment)
        self.num_calls = 0
        self.num_failed = 0
        # the pattern is longer than any tag that it finds
        self.closing_tag = re.compile(f"</({'|'.join(self.tools)})>".encode())
        self.text = b""  # what was written since the last answer
        self.ids = []  # all tokens
        self.written = []  # for each of them, whether the policy wrote it
        self.pictures = []
        self.unread = []  # an answer that the model has not read yet
        self.cut = False  # an answer did not fit
        self.ended = False

    def step(self, token: int, turn_ends: bool, text_ends: bool, sampler: "ToolSampler") -> bool:
        """Take a drawn token, with which a turn ends or a stop string; say whether the row ends."""
        if self.ended:  # it runs on until `generate` drops rows
            return True
        self.written.append(True)
        self.ids.append(token)
        tokens_left = sampler.sampling.max_new_tokens - len(self.written)
        drawn_bytes = token_bytes(sampler.processor.tokenizer, token, NO_TEXT)
        calls = self.new_calls(drawn_bytes, turn_ends, text_ends)
        row_ends = turn_ends or text_ends
        if calls:
            row_ends = self.answer(calls, turn_ends, tokens_left, sampler.processor)
        self.ended = row_ends or tokens_left == 0
        return row_ends

    def new_calls(self, drawn: bytes, turn_ends: bool, text_ends: bool) -> list[tuple[str, str]]:
        """Add a token to the text; find the calls that it completes, as many as are allowed."""
        searched_from = max(0, len(self.text) - len(self.closing_tag.pattern))
        self.text += drawn
        if text_ends or not (turn_ends or self.closes_a_call(searched_from)):
            return []
        calls = find_calls(self.text.decode(errors="replace"), self.tools, turn_ends)
        return calls[: self.settings.max_tool_calls - self.num_calls]

    def closes_a_call(self, searched_from: int) -> bool:
        """Say whether a tag is new in the text whose opening tag is there, too."""
        closing_tag = self.closing_tag.search(self.text, searched_from)
        return closing_tag is not None and b"<%s>" % closing_tag[1] in self.text

    def answer(self, calls: list, turn_ended: bool, tokens_left: int, processor: Processor) -> bool:
        """Answer calls, for the model to read; True: it is done, or the answers do not fit."""
        answers, pictures = self.call_tools(calls, processor)
        if self.done:
            return True
        ids = encode_answers(answers, pictures, turn_ended, processor)
        self.cut = len(ids) >= tokens_left  # a picture is never cut, and something has to follow
        if self.cut:
            return True
        answer, pictures = as_prompt(ids, pictures, processor)
        self.unread.append(answer)
        self.written += [False] * len(ids)
        self.ids += ids
        self.pictures += pictures
        self.text = b""
        return False

    def call_tools(self, calls: list, processor: Processor) -> tuple[list[list[dict]], list]:
        """Call tools; return the parts that answer each, and their pictures (image, grid)."""
        answers = []
        pictures = []
        for name, inside in calls:
            parts, shown, succeeded = answer(self.tools, name, inside, processor, self.settings)
            answers.append(parts)
            pictures += shown
            self.num_failed += not succeeded
        self.num_calls += len(calls)
        return answers, pictures

    @property
    def done(self) -> bool:
        """Say whether the environment is done: nothing is written after its last call."""
        return bool(getattr(self.environment, "done", False))

    def finish(self, completion: Completion):
        """Take what was drawn, and tell it what the tools have answered."""
        self.insert_answers(completion)
        completion.stopped &= not self.cut
        completion.environment = self.environment
        completion.calls = self.num_calls, self.num_failed, self.cut

    def insert_answers(self, completion: Completion):
        """Put what was answered between the drawn tokens of a completion."""
        written = torch.tensor(self.written)
        completion.ids = torch.tensor(self.ids)
        completion.written = written
        completion.pictures = self.pictures
        completion.logps = torch.zeros(len(written)).masked_scatter(written, completion.logps)
        if completion.sampling_mask:
            counts, kept_ids = completion.sampling_mask
            counts = written.long().masked_scatter(written, counts)
            completion.sampling_mask = counts, kept_ids


def encode_answers(answers: list, pictures: list, turn_ended: bool, processor) -> list[int]:
    """Encode answers: inside the policy's turn, or with what opens another one."""
    grids = [grid for _, grid in pictures]
    opening = turn_opening(processor) if turn_ended else ()
    return list(chain(*processor.encode(lay_out(answers, opening), grids)))


def as_prompt(ids: list[int], pictures: list, processor: Processor) -> tuple[Prompt, list]:
    """Make a Prompt of answers, for the model to read, and pictures as a Completion has them."""
    pictures = [(image, *processor.image_processor(image)) for image, _ in pictures]
    no_patches = torch.zeros(0, processor.image_processor.patch_dim)
    patches = torch.cat([no_patches, *(patches for _, patches, _ in pictures)])
    grids = torch.tensor([grid for *_, grid in pictures], dtype=torch.long).view(-1, 3)
    return Prompt(torch.tensor(ids), patches, grids, torch.zeros(len(grids))), pictures


def shared(image: Image) -> Image:
    """Return the same picture, whose pixels are copied when somebody writes to it."""
    image.load()
    image = image._new(image.im)
    image.readonly = 1
    return image


@dataclass
class AnswerSpan:
    """Where the tokens of one answer are, and which keys they see."""

    row: int  # their row of the decoding
    tokens: slice  # among all tokens that are read at once
    prompt: int  # their prompt in the decoding
    prompt_length: int
    begin: int  # of the row's own tokens these are begin to end
    end: int


class AnswerAttention(DecodeAttention):
    """The attention of answers: tokens that some rows of a decoding read at once, end to end.

    They attend to their row's prompt, to its own tokens and causally to themselves, and are own
    tokens of their row then.
    """

    def __init__(self, decoding: DecodeAttention, rows: list[int], lengths: list[int]):
        self.decoding = decoding
        self.memory = decoding.memory
        self.answer_spans = []
        prompt_lengths = (decoding.prompt_bias == 0).sum(1).tolist()  # B of them
        newest = decoding.newest.tolist()  # R of them
        self.spans = []  # for recurrent layers
        new_tokens = [0] * len(newest)
        tokens_before = 0
        for row, length in zip(rows, lengths, strict=True):
            prompt = int(decoding.prompt_index[row])
            begin = newest[row] + 1
            span = AnswerSpan(
                row=row,
                tokens=slice(tokens_before, tokens_before + length),
                prompt=prompt,
                prompt_length=prompt_lengths[prompt],
                begin=begin,
                end=begin + length,
            )
            self.answer_spans.append(span)
            self.spans.append((slice(row, row + 1), span.tokens))
            new_tokens[row] = length
            tokens_before += length
        longest = max(span.end - 1 for span in self.answer_spans)
        new_tokens = to_device(torch.tensor(new_tokens), decoding.device)
        decoding.advance(new_tokens, max(longest - max(newest), 0))

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row_k, row_v = self.decoding.row_kv[layer_index]  # (R, K, C, D)
        prompt_k, prompt_v = self.decoding.prompt_kv[layer_index]  # (B, K, P, D)
        out = []
        for span in self.answer_spans:
            queries = q[span.tokens].transpose(0, 1)[None]  # (1, H, tokens, D)
            keys = extend(row_k, prompt_k, k, span)
            values = extend(row_v, prompt_v, v, span)
            attended = dense_attention(queries, keys, values, is_causal=True)
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out)


def extend(row_cache: Tensor, prompts: Tensor, new: Tensor, span: AnswerSpan) -> Tensor:
    """Add an answer's keys, or values, to those of its row: all that it sees, (1, K, P + C, D)."""
    row_cache[span.row, :, span.begin : span.end] = new[span.tokens].transpose(0, 1)
    seen_prompt = prompts[span.prompt, :, : span.prompt_length]  # (K, P, D)
    return torch.cat([seen_prompt, row_cache[span.row, :, : span.end]], dim=1)[None]


class ReadingDecode(Decode):
    """A decode step, after which rows read what their tools have answered, in one forward."""

    def __init__(self, decode: Decode, sampler: "ToolSampler"):
        self.decode = decode
        self.sampler = sampler
        self.attention_type = decode.attention_type

    def __call__(self, model, ids: Tensor, attention: DecodeAttention) -> Tensor:
        logits = self.decode(model, ids, attention)
        plays = [self.sampler.plays[row] for row in attention.rows.tolist()]
        rows = [i for i, play in enumerate(plays) if play.unread]
        if rows:
            answers = [plays[i].unread.pop() for i in rows]
            index = to_device(torch.tensor(rows), attention.device)
            logits[index] = self.read(model, attention, rows, index, answers)
        return logits

    def read(self, model, attention, rows: list, index: Tensor, answers: list[Prompt]) -> Tensor:
        """Read answers of rows, also given as a tensor; returns logits (rows, V) of what follows."""
        batch = pack(answers, [[] for _ in answers], model.config, attention.device)
        lengths = batch.layout.prompt_lengths
        repeats = to_device(torch.tensor(lengths), attention.device)
        start = attention.start[index] + attention.newest[index] + 1
        batch.position_ids += start.repeat_interleave(repeats)
        answer_attention = AnswerAttention(attention, rows, lengths)
        hidden = model(batch, answer_attention, batch.layout.last_index)
        # pictures take fewer positions than tokens
        last_positions = [x.max() for x in batch.position_ids.split(lengths, dim=1)]
        attention.start[index] = torch.stack(last_positions) - attention.newest[index]
        self.sampler.record_tokens(
            attention.rows[index].repeat_interleave(repeats), batch.input_ids
        )
        return float32_matmul(hidden, model.lm_head.weight.T)


class ToolSampler(Sampler):
    """Draws completions that may call the tools of the environment of `sampling`."""

    play_type = Play

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.make = get_environment(self.sampling.environment)
        if not self.gather_weights:  # ranks read their answers at different steps
            raise ValueError("sampling.environment: leave out rollout.gather_weights: false")

    def token_sampler(self, prompts, num_generations, keys) -> TokenSampler:
        self.plays = [play for prompt in prompts for play in self.begin(prompt, num_generations)]
        return super().token_sampler(prompts, num_generations, keys)

    def generate(self, model, prompts, num_generations, choose) -> list[list[Completion]]:
        groups = super().generate(model, prompts, num_generations, choose)
        for play, completion in zip(self.plays, chain(*groups), strict=True):
            play.finish(completion)
        return groups

    def begin(self, prompt: Prompt, count: int) -> list[Play]:
        """Make environments for the completions of a prompt, and tell them its row."""
        if prompt.row is None:
            raise ValueError("environments are told a prompt's row: make it with Row.prompt")
        row = prompt.row
        columns = self.columns(prompt)
        where = row.where or f"row {row.index}"
        with naming(f"{where}: sampling.environment {self.sampling.environment}"):
            plays = []
            for _ in range(count):
                copies = {id(image): shared(image) for image in columns["images"]}
                environment = begin(self.make, deepcopy(columns, copies))
                plays.append(self.play_type(environment, prompt))
        return plays

    def columns(self, prompt: Prompt) -> dict:
        """Collect what `reset` is told of a row; an image's extent is the scale of its boxes."""
        row = prompt.row
        images = list(row.images)  # they may be decoded only now
        space = row.columns.get("box_space") or self.processor.box_space
        patch_size = self.processor.image_processor.patch_size
        grids = prompt.image_grid_thw[prompt.second_per_grid_ts == 0].tolist()  # not of videos
        extents = []
        for image, (_, rows, columns) in zip(images, grids, strict=True):
            resized = (patch_size * columns, patch_size * rows)
            extents.append(extent(space, image.size, resized))
        return row.columns | {"images": images, "extents": extents, "prompt": row.messages}

    def decode(self) -> Decode:
        return ReadingDecode(super().decode(), self)

    def is_finished(self, rows: Tensor, ids: Tensor, turn_ends: Tensor) -> Tensor:
        text_ends = self.record_tokens(rows, ids)
        drawn = (x.tolist() for x in (rows, ids, turn_ends, text_ends))
        ends = []
        for row, token, turn_end, text_end in zip(*drawn, strict=True):
            ends.append(self.plays[row].step(token, turn_end, text_end, self))
        return to_device(torch.tensor(ends), rows.device)
