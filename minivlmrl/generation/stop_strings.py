"""Find stop strings byte by byte, because they may begin and end inside of tokens."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from minivlmrl.data.tokenizer import Tokenizer

# Byte-level BPE writes a byte as one character: a printable one of Latin-1, or one from 256 on.
PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {
    **{chr(byte): byte for byte in PRINTABLE},
    **{chr(code): byte for code, byte in enumerate(UNPRINTABLE, start=256)},
}
# bytes of an id without a token: this byte is not in UTF-8, so no string is found across it
NO_TEXT = b"\xff"


def token_bytes(tokenizer: Tokenizer, token_id: int, missing: bytes = b"") -> bytes:
    """Return the bytes of a token's text: b" cat" of Ġcat, both bytes of é of Ã©, the first of Ã."""
    token = tokenizer.backend.id_to_token(token_id)
    if token is None:
        return missing
    return bytes(BYTES[char] for char in token) if BYTES.keys() >= set(token) else token.encode()


class StopStrings:
    """Finds the rows that complete a stop string, like StopStringCriteria of transformers 5.23.

    A string is complete with the token that has its last byte, whatever follows in that token: the
    tokens "</answ" and "er>." complete </answer>, and the full stop stays. A string may begin in the
    row's prompt, but not end there.

    Args:
        prompts: (P,) int64 ids of each row's prompt.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer, prompts: Sequence[Tensor]):
        self.strings = [string.encode() for string in strings]
        self.longest = max(map(len, self.strings))
        self.bytes_of = cache(lambda token_id: token_bytes(tokenizer, token_id, NO_TEXT))
        self.before: list[bytes] = []  # last bytes of each row's text
        for ids in prompts:
            last_ids = ids[-self.longest :].tolist()
            self.before.append(b"".join(map(self.bytes_of, last_ids)))

    def completed(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Add a token (r,) to each of these rows (r,); return (r,) bool: it completes a string."""
        ends = []
        for row, token_id in zip(rows.tolist(), ids.tolist(), strict=True):
            before = self.before[row]
            text = before + self.bytes_of(token_id)
            is_complete = False
            for string in self.strings:
                # few enough of the bytes before that a match includes a byte of the token
                start = max(0, len(before) + 1 - len(string))
                is_complete |= string in text[start:]
            ends.append(is_complete)
            self.before[row] = text[-self.longest :]
        return torch.tensor(ends, device=ids.device)
