"""Text of generated tokens, as it becomes readable, and the texts that end a request."""

from __future__ import annotations

from sgl_piecewise.models.tokenizer import Tokenizer

_UNREADABLE = "\N{REPLACEMENT CHARACTER}"


def _num_equal_at_begin(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


class TextStream:
    """Makes text of one request's new tokens, token by token.

    A token may be part of a character, and a text may be the beginning of one that ends the
    request: both are held back until more is known.

    Args:
        tokenizer: None where there is no vocabulary: no text comes then.
        stop_texts: Any of these ends the request.

    Attributes:
        text: All that was handed out.
        has_stopped: Whether a stop text came; ``text`` ends before it.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop_texts: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_texts = stop_texts
        self._token_ids: list[int] = []
        self._begin = 0
        self._read = 0
        self._held = ""
        self.text = ""
        self.has_stopped = False

    def push(self, token_id: int) -> str:
        """Takes a token; returns the text that became readable."""
        self._token_ids.append(token_id)
        return self._hand_out(self._decode(is_last=False), is_last=False)

    def flush(self) -> str:
        """Returns what was held back; no token comes any more."""
        return self._hand_out(self._decode(is_last=True), is_last=True)

    def _decode(self, *, is_last: bool) -> str:
        if self._tokenizer is None:
            return ""
        # Tokens before are decoded along, for spaces and characters that only show in company.
        before = self._tokenizer.decode(self._token_ids[self._begin : self._read])
        now = self._tokenizer.decode(self._token_ids[self._begin :])
        if now == before or (now.endswith(_UNREADABLE) and not is_last):
            return ""
        self._begin, self._read = self._read, len(self._token_ids)
        # Some tokenizers take a space back before a full stop. It is with the reader already; the full stop is not.
        return now[_num_equal_at_begin(before, now) :]

    def _hand_out(self, new: str, *, is_last: bool) -> str:
        if self.has_stopped:
            return ""
        held = self._held + new
        ends = [held.find(stop) for stop in self._stop_texts if stop in held]
        if ends:
            self.has_stopped = True
            self._held, given = "", held[: min(ends)]
        else:
            num_held = 0 if is_last else self._num_that_may_begin_a_stop(held)
            given, self._held = held[: len(held) - num_held], held[len(held) - num_held :]
        self.text += given
        return given

    def _num_that_may_begin_a_stop(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stop_texts), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_texts):
                return length
        return 0
