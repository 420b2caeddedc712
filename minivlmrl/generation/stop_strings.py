"""Find stop strings in the bytes of completions.

Bytes are compared instead of tokens, because a stop string may begin or end inside a token.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from minivlmrl.data.tokenizer import Tokenizer

# Byte-level BPE writes each byte as one character: a printable byte as itself, and a space as "Ġ" (code point 288).
PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {
    **{chr(byte): byte for byte in PRINTABLE},
    **{chr(code): byte for code, byte in enumerate(UNPRINTABLE, start=256)},
}
# represents unknown token ids; no stop string contains this byte, because UTF-8 never uses it
NO_TEXT = b"\xff"


def token_bytes(tokenizer: Tokenizer, token_id: int, missing: bytes = b"") -> bytes:
    """Return the UTF-8 bytes of a token's text, or `missing` if the id does not have a token.

    Example: in byte-level BPE, the token Ġcat has the bytes b" cat".
    """
    token = tokenizer.backend.id_to_token(token_id)
    if token is None:
        return missing
    return bytes(BYTES[char] for char in token) if BYTES.keys() >= set(token) else token.encode()


class StopStrings:
    """Find the rows that complete a stop string, as StopStringCriteria in transformers 5.23 does.

    A stop string is complete as soon as a token contains its last byte, even if the token contains more text after it.
    For example, the tokens "</answ" and "er>." complete </answer>, and the period remains in the completion. A stop
    string may begin in the prompt, but must end in the completion.

    Args:
        strings: the stop strings.
        prompts: each row's prompt token ids, (P,) int64.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer, prompts: Sequence[Tensor]):
        self.strings = [string.encode() for string in strings]
        self.longest = max(map(len, self.strings))
        self.bytes_of = cache(lambda token_id: token_bytes(tokenizer, token_id, NO_TEXT))
        self.before: list[bytes] = []  # the last bytes of each row's text
        for ids in prompts:
            last_ids = ids[-self.longest :].tolist()
            self.before.append(b"".join(map(self.bytes_of, last_ids)))

    def completed(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Append one token to each given row, and find the rows that complete a stop string.

        Args:
            rows: (r,), the row indices.
            ids: (r,), each row's new token.
        Returns:
            (r,) bool, True where the new token completes a stop string.
        """
        ends = []
        for row, token_id in zip(rows.tolist(), ids.tolist(), strict=True):
            before = self.before[row]
            text = before + self.bytes_of(token_id)
            is_complete = False
            for string in self.strings:
                # Text before the new token was searched earlier, so a match must contain a byte of the new token.
                start = max(0, len(before) + 1 - len(string))
                is_complete |= string in text[start:]
            ends.append(is_complete)
            self.before[row] = text[-self.longest :]
        return torch.tensor(ends, device=ids.device)
