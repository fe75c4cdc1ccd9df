"""A tokenizer with one token a character, for the built-in tasks. It is the same everywhere: nothing is loaded."""

from collections.abc import Sequence

PAD, BOS, EOS = 0, 1, 2
CHARACTERS = "0123456789+-*/=()<>,.:;?!#$%&'\"_ \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
UNKNOWN = "?"
"""Stands for characters that have no token."""


class CharacterTokenizer:
    """See the module."""

    eos = EOS

    def __init__(self) -> None:
        self._token = {character: number for number, character in enumerate(CHARACTERS, start=EOS + 1)}
        # Rounded up: matrix products like even sizes.
        self.vocab_size = (len(CHARACTERS) + EOS + 1 + 7) // 8 * 8

    def encode(self, text: str, *, opening: bool = True) -> list[int]:
        tokens = [self._token.get(character, self._token[UNKNOWN]) for character in text]
        return [BOS, *tokens] if opening else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text = []
        for token in tokens:
            if token == EOS:
                break
            if token > EOS:
                place = token - EOS - 1
                text.append(CHARACTERS[place] if place < len(CHARACTERS) else UNKNOWN)
        return "".join(text)
