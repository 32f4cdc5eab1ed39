"""What the command shows while it generates: text as it comes, and one closing line."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from sgl_piecewise.runtime.records import PhaseClock

from .engine import OfflineEngine
from .requests import FinishReason, TokenEvent


class TokenPrinter:
    """Prints events of one prompt as they come, of several prompts as each one ends.

    Args:
        console: Where text goes.
        num_prompts: How many there are.
        has_text: Whether tokens become text; without a tokenizer their numbers are printed.

    Attributes:
        num_tokens: Tokens so far.
        errors: Of requests that ended with one.
    """

    def __init__(self, console: Console, *, num_prompts: int, has_text: bool) -> None:
        self._console = console
        self._has_text = has_text
        self._is_single = num_prompts == 1
        self._pending: dict[str, list[str]] = {}
        self.num_tokens = 0
        self.errors: list[str] = []

    def __call__(self, event: TokenEvent) -> None:
        """Takes an event."""
        self.num_tokens += event.token_id is not None
        text = event.text or ("" if event.token_id is None or self._has_text else f"{event.token_id} ")
        if self._is_single:
            self._console.print(Text(text), end="", soft_wrap=True)
        else:
            self._pending.setdefault(event.request_id, []).append(text)
        if event.error is not None:
            self.errors.append(event.error)
        if event.finish_reason is None:
            return
        if self._is_single:
            self._console.print()
        else:
            self._print_whole(event.request_id, event.finish_reason)

    def close(self) -> None:
        """Prints what came of prompts that did not end."""
        for name in list(self._pending):
            self._print_whole(name, FinishReason.INTERRUPTED)

    def _print_whole(self, name: str, reason: FinishReason) -> None:
        title = Text.assemble((name, "bold"), f" ({reason.value}): ")
        self._console.print(title + Text("".join(self._pending.pop(name))), soft_wrap=True)


def closing_line(engine: OfflineEngine, num_tokens: int, clock: PhaseClock) -> str:
    """Returns what ran in one line: tokens, time, forwards by mode and runner, fallbacks."""
    generate_s = clock.phases_s.get("generate", 0.0)
    rate = f"{num_tokens / generate_s:,.1f} tokens/s" if generate_s else "no time"
    device = (
        "emulated: times say nothing about a GPU" if engine.runner.is_emulated else str(engine.runner.device)
    )
    retractions = engine.scheduler.num_retractions
    waited = f"; {retractions} retracted for want of slots" if retractions else ""
    forwards = engine.runner.log.summary()
    return f"{num_tokens} tokens in {generate_s:.2f} s ({rate}, {device}). Forwards: {forwards}{waited}."
