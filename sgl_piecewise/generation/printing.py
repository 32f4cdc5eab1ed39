"""What the command shows while it generates: text as it comes, and one closing line.

Generated text is written as it is, tabs and line ends included: it may be a file that somebody keeps. Only a
terminal gets control characters spelled out, since it would obey them.
"""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from sgl_piecewise.models.tokenizer import Tokenizer
from sgl_piecewise.runtime.records import PhaseClock

from .engine import OfflineEngine
from .logprobs import TokenLogprob
from .requests import FinishReason, TokenEvent

# A carriage return ends a line with what follows; alone it writes over it.
_OBEYED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


class TokenPrinter:
    """Prints events of one prompt as they come, of several prompts as each one ends.

    Args:
        console: Where text goes.
        num_prompts: How many there are.
        tokenizer: Makes text of tokens; without one their numbers are printed.

    Attributes:
        num_tokens: Tokens so far.
        errors: Of requests that ended with one.
    """

    def __init__(self, console: Console, *, num_prompts: int, tokenizer: Tokenizer | None) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._logprobs: dict[str, list[Text]] = {}
        self._is_single = num_prompts == 1
        self._pending: dict[str, list[str]] = {}
        self.num_tokens = 0
        self.errors: list[str] = []

    def __call__(self, event: TokenEvent) -> None:
        """Takes an event."""
        self.num_tokens += event.token_id is not None
        has_text = self._tokenizer is not None
        text = event.text or ("" if event.token_id is None or has_text else f"{event.token_id} ")
        lines = [self._logprob_line(entry, "prompt") for entry in event.prompt_logprobs]
        if event.logprob is not None:
            lines.append(self._logprob_line(event.logprob, "new"))
        self._logprobs.setdefault(event.request_id, []).extend(lines)
        if self._is_single:
            self._write(text)
        else:
            self._pending.setdefault(event.request_id, []).append(text)
        if event.error is not None:
            self.errors.append(event.error)
        if event.finish_reason is None:
            return
        if self._is_single:
            self._console.print()
            self._print_logprobs(event.request_id)
        else:
            self._print_whole(event.request_id, event.finish_reason)

    def close(self) -> None:
        """Prints what came of prompts that did not end."""
        for name in list(self._pending):
            self._print_whole(name, FinishReason.INTERRUPTED)
        for name in list(self._logprobs):
            self._print_logprobs(name)

    def _print_whole(self, name: str, reason: FinishReason) -> None:
        title = Text.assemble((name, "bold"), f" ({reason.value}): ")
        self._console.print(title, end="", soft_wrap=True)
        self._write("".join(self._pending.pop(name)) + "\n")
        self._print_logprobs(name)

    def _write(self, text: str) -> None:
        """Writes generated text, which the console would lay out: it makes spaces of tabs and drops line ends."""
        if self._console.is_terminal:
            text = _OBEYED.sub(lambda found: f"\\x{ord(found.group()):02x}", text)
        self._console.file.write(text)
        self._console.file.flush()

    def _print_logprobs(self, name: str) -> None:
        for line in self._logprobs.pop(name, []):
            self._console.print(line, soft_wrap=True)

    def _logprob_line(self, entry: TokenLogprob, which: str) -> Text:
        """One line: whose, how likely, the token, and the most likely ones in its place."""
        top = ", ".join(f"{self._shown(token_id)} {logprob:.4f}" for token_id, logprob in entry.top)
        line = f"  {which:6} {entry.logprob:9.4f}  {self._shown(entry.token_id)}"
        return Text(f"{line}  of {top}" if top else line)

    def _shown(self, token_id: int) -> str:
        return str(token_id) if self._tokenizer is None else repr(self._tokenizer.decode([token_id]))


def closing_line(engine: OfflineEngine, num_tokens: int, clock: PhaseClock) -> str:
    """Returns what ran in one line: tokens, time, forwards by mode and runner, fallbacks."""
    generate_s = clock.phases_s.get("generate", 0.0)
    rate = f"{num_tokens / generate_s:,.1f} tokens/s" if generate_s else "no time"
    device = (
        "emulated: times say nothing about a GPU" if engine.runner.is_emulated else str(engine.runner.device)
    )
    retractions = engine.scheduler.num_retractions
    waited = f"; {retractions} retracted for want of slots" if retractions else ""
    rows = engine.num_dropped_rows
    dropped = f"; {rows} row{'s' * (rows > 1)} computed for requests that had ended" if rows else ""
    forwards = engine.runner.log.summary()
    return f"{num_tokens} tokens in {generate_s:.2f} s ({rate}, {device}). Forwards: {forwards}{waited}{dropped}."
