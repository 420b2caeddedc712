"""Texts that end a completion, found byte by byte: they may begin and end inside tokens."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from minivlmrl.data.tokenizer import Tokenizer

# Byte-level BPE writes a byte as one character: printable ones of Latin-1, others from 256 on.
PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {
    **{chr(byte): byte for byte in PRINTABLE},
    **{chr(code): byte for code, byte in enumerate(OTHERS, start=256)},
}
# for an id without a token; it is nowhere in UTF-8, so no text is found across it
NO_TEXT = b"\xff"


def token_bytes(tokenizer: Tokenizer, token_id: int, missing=b"") -> bytes:
    """Find what a token adds to the text: Ġcat gives b" cat", Ã© the bytes of é, Ã the first of them."""
    token = tokenizer.backend.id_to_token(token_id)
    if token is None:
        return missing
    return bytes(BYTES[char] for char in token) if BYTES.keys() >= set(token) else token.encode()


class StopStrings:
    """Which rows have just completed one of the texts, as StopStringCriteria of transformers 5.23.

    A text is complete with the token that has its last byte, whatever else that token says:
    "</answ" and "er>." end with </answer> too, and the point stays. The text may begin in the row's
    prompt, but not end there.

    Args:
        prompts: (P,) int64 ids of each row's prompt.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer, prompts: Sequence[Tensor]):
        self.strings = [string.encode() for string in strings]
        self.longest = max(map(len, self.strings))
        self.bytes_of = cache(lambda token_id: token_bytes(tokenizer, token_id, NO_TEXT))
        self.before = []  # of each row the last bytes of its text
        for ids in prompts:
            last_ids = ids[-self.longest :].tolist()
            self.before.append(b"".join(map(self.bytes_of, last_ids)))

    def completed(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Note that these rows, (r,) numbers, drew tokens, (r,) ids; (r,) bool: that ends them."""
        ends = []
        for row, token_id in zip(rows.tolist(), ids.tolist(), strict=True):
            before = self.before[row]
            text = before + self.bytes_of(token_id)
            is_complete = False
            for string in self.strings:
                # so little of what comes before that a match needs the token
                start = max(0, len(before) + 1 - len(string))
                is_complete |= string in text[start:]
            ends.append(is_complete)
            self.before[row] = text[-self.longest :]
        return torch.tensor(ends, device=ids.device)
