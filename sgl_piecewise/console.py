"""What the commands share at the terminal: options, errors as messages with an exit code, and a progress bar."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sgl_piecewise.runtime.errors import SglPiecewiseError

EXIT_WRONG = 1
EXIT_REQUEST = 2
EXIT_INTERRUPTED = 130

ModelName = Annotated[
    str,
    typer.Argument(help="A Hugging Face folder, a GGUF file, or a name (a shape has random weights)."),
]
DeviceName = Annotated[str, typer.Option(help="auto, cuda, cuda:N, or cpu (emulated).")]
DtypeName = Annotated[
    str, typer.Option(help="auto (bfloat16 on CUDA, else float32), float32, bfloat16, float16.")
]
Depth = Annotated[int | None, typer.Option(help="Another depth, for random weights only.")]
MayDownload = Annotated[
    bool, typer.Option("--download/--no-download", help="Whether the default model may be downloaded.")
]
ShowsTraceback = Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")]


@contextlib.contextmanager
def errors_as_messages(shows_traceback: bool) -> Iterator[None]:
    """Turns errors that say what to do into one message and an exit code.

    What the terminal or file has no character for is spelled out from now on: it is no error of this program, and
    would end it in the middle of a text.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted; nothing was written.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (SglPiecewiseError, torch.OutOfMemoryError) as err:
        if shows_traceback:
            raise
        message = Text.assemble(("Error: ", "bold red"), str(err))
        Console(stderr=True, soft_wrap=True).print(message)
        raise typer.Exit(EXIT_REQUEST) from None


@contextlib.contextmanager
def progress_bar() -> Iterator[ProgressBar]:
    """A bar on stderr, off where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress)


class ProgressBar:
    """Shows one phase at a time; a new phase replaces the last."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("loading the model", total=None)
        self._phase = ""

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._progress.remove_task(self._task)
            self._task = self._progress.add_task(phase, total=total)
            self._phase = phase
        self._progress.update(self._task, completed=done, total=total)
