"""Find stop strings in completions.

Stop strings are compared by bytes, because they may begin or end inside a token.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from minivlmrl.data.tokenizer import Tokenizer

# byte-level BPE writes each byte as one character: printable bytes as themselves, a space as "Ġ" (code point 288)
PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {
    **{chr(byte): byte for byte in PRINTABLE},
    **{chr(code): byte for code, byte in enumerate(UNPRINTABLE, start=256)},
}
# bytes of unknown token ids: 0xff never occurs in UTF-8, so it matches no stop string
NO_TEXT = b"\xff"


def token_bytes(tokenizer: Tokenizer, token_id: int, missing: bytes = b"") -> bytes:
    """Return a token's UTF-8 bytes, or `missing` for an unknown id.

    Example: in byte-level BPE, the token Ġcat stands for b" cat".
    """
    token = tokenizer.backend.id_to_token(token_id)
    if token is None:
        return missing
    return bytes(BYTES[char] for char in token) if BYTES.keys() >= set(token) else token.encode()


class StopStrings:
    """Find completions that end in a stop string, like StopStringCriteria in transformers 5.23.

    Text after a stop string stays in the completion if it is part of the same token: the tokens "</answ" and "er>."
    complete </answer>. A stop string may begin in the prompt.

    Args:
        prompts: (P,) int64 prompt token ids per row.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer, prompts: Sequence[Tensor]):
        self.strings = [string.encode() for string in strings]
        self.longest = max(map(len, self.strings))
        self.bytes_of = cache(lambda token_id: token_bytes(tokenizer, token_id, NO_TEXT))
        # last bytes of each row, at least as long as any stop string
        self.before = [b"".join(map(self.bytes_of, ids[-self.longest :].tolist())) for ids in prompts]

    def completed(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Append a new token to each row, and check whether the token completes a stop string.

        Args:
            rows: (r,) row indices.
            ids: (r,) new token ids.
        Returns:
            (r,) bool.
        """
        ends = []
        for row, token_id in zip(rows.tolist(), ids.tolist(), strict=True):
            before = self.before[row]
            text = before + self.bytes_of(token_id)
            # search only for stop strings that end in the new token
            ends.append(any(string in text[max(0, len(before) + 1 - len(string)) :] for string in self.strings))
            self.before[row] = text[-self.longest :]
        return torch.tensor(ends, device=ids.device)
