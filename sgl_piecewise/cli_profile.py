"""The commands about compiling: ``profile`` shows what a build did with its time, ``cache`` what is on disk."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgl_piecewise.compiler.cache import CompileCache, StoredPiece
from sgl_piecewise.models.loading import DEFAULT_MODEL
from sgl_piecewise.runtime.atomic_file import write_atomically
from sgl_piecewise.runtime.build_profile import BuildProfile, write_profile
from sgl_piecewise.runtime.config import cache_folder as default_cache_folder
from sgl_piecewise.runtime.errors import ConfigError

from .comparison.options import default_sizes, parse_sizes, resolve_device, resolve_dtype
from .comparison.report import check_can_write
from .comparison.words import counted, in_words_bytes, in_words_s
from .console import (
    Depth,
    DeviceName,
    DtypeName,
    MayDownload,
    ModelName,
    ShowsTraceback,
    errors_as_messages,
    progress_bar,
)
from .profiling.build import DEFAULT_STRATEGY, ProfileRequest, cell_of, profile_build
from .profiling.chrome_trace import chrome_trace
from .profiling.cold_and_warm import profile_cold_and_warm
from .profiling.page import profile_page
from .profiling.reading import read_profile
from .profiling.table import print_profiles

_MAX_KEY_DIGITS = 12
# What `profile` takes with --read; everything else says how to build.
_FOR_READING = ("read", "json", "html", "trace", "traceback", "cold_and_warm")


def profile(
    context: typer.Context,
    model: ModelName = DEFAULT_MODEL,
    strategy: Annotated[
        str,
        typer.Option(
            help="The cell that is built: breakable, full, fx_piecewise, tc_piecewise, tc_full, tc, ..."
        ),
    ] = DEFAULT_STRATEGY,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    capture_sizes: Annotated[
        str | None, typer.Option(help="As 16,32,64 or a range of the default ladder as 4..4096.")
    ] = None,
    share_layers: Annotated[
        bool,
        typer.Option("--share-layers/--no-share-layers", help="Whether equal layers are traced once."),
    ] = True,
    cold_and_warm: Annotated[
        bool,
        typer.Option(
            "--cold-and-warm",
            help="Build twice in fresh processes: on an empty cache, then on the filled one.",
        ),
    ] = False,
    cache_folder: Annotated[
        Path | None, typer.Option(help="Where compiled pieces are kept. Default: SGL_PIECEWISE_CACHE.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the profile to this file; with --cold-and-warm one for each.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a time line to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto to this file.")] = None,
    read: Annotated[
        list[Path] | None,
        typer.Option(help="Build nothing; show profiles from files. May be given more than once."),
    ] = None,
    layers: Depth = None,
    seed: Annotated[int, typer.Option(help="Of random weights and tokens.")] = 0,
    download: MayDownload = True,
    traceback: ShowsTraceback = False,
) -> None:
    """Profile one build of a model: what was traced, compiled, warmed up and captured, and how long it took."""
    with errors_as_messages(traceback):
        for path in (json, html, trace):
            if path is not None:
                check_can_write(path)
        if read and cold_and_warm:
            raise ConfigError(
                "--read shows profiles that there are, --cold-and-warm makes two: give one of them."
            )
        if read:
            _refuse_unread(context)
        compiler = cell_of(strategy)[0]
        if cache_folder is not None and compiler != "inductor":
            raise ConfigError(
                f"--cache-folder is given, but {strategy!r} keeps nothing on disk: only what Inductor compiled is "
                "kept. Leave it out, or name a strategy such as tc_piecewise."
            )
        torch_device = resolve_device(device)
        request = ProfileRequest(
            model=model,
            strategy=strategy,
            device=torch_device,
            dtype=resolve_dtype(dtype, torch_device),
            capture_sizes=default_sizes(torch_device)
            if capture_sizes is None
            else parse_sizes(capture_sizes),
            cache_folder=cache_folder,
            shares_layers=share_layers,
            num_layers=layers,
            seed=seed,
            may_download=download,
            command=("sgl-piecewise", *sys.argv[1:]),
        )
        if read:
            profiles = {path.stem: read_profile(path) for path in read}
        elif cold_and_warm:
            with progress_bar() as on_progress:
                profiles = profile_cold_and_warm(
                    _arguments(request), cache_folder, on_progress, keeps_pieces=compiler == "inductor"
                )
        else:
            profiles = {strategy: profile_build(request)}
        _write(profiles, json, html, trace)
        print_profiles(profiles, Console())


def _refuse_unread(context: typer.Context) -> None:
    """Raises ConfigError for what was given to say how to build, where nothing is built."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in _FOR_READING and source is not None and source.name == "COMMANDLINE":
            given = "the model" if name == "model" else f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"--read shows profiles that there are and builds nothing, so {given} would be ignored: leave one of "
                "them out."
            )


def _arguments(request: ProfileRequest) -> list[str]:
    """Returns the command line that makes a request again, but for the cache folder and files."""
    arguments = [
        request.model,
        *("--strategy", request.strategy),
        *("--device", str(request.device)),
        *("--dtype", str(request.dtype).removeprefix("torch.")),
        *("--capture-sizes", ",".join(map(str, request.capture_sizes))),
        *("--seed", str(request.seed)),
        "--share-layers" if request.shares_layers else "--no-share-layers",
        "--download" if request.may_download else "--no-download",
    ]
    return arguments if request.num_layers is None else [*arguments, "--layers", str(request.num_layers)]


def _write(
    profiles: dict[str, BuildProfile], json: Path | None, html: Path | None, trace: Path | None
) -> None:
    written = []
    if json is not None:
        for title, one in profiles.items():
            path = json if len(profiles) == 1 else json.with_stem(f"{json.stem}-{title}")
            write_profile(one, path)
            written.append(path)
    for file, text in ((html, profile_page), (trace, chrome_trace)):
        if file is not None:
            write_atomically(file, text(profiles))
            written.append(file)
    for path in written:
        Console(stderr=True).print(Text(f"Wrote {path}"))


def cache(
    folder: Annotated[
        Path | None, typer.Option(help="The cache folder. Default: SGL_PIECEWISE_CACHE.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete every compiled piece.")] = False,
) -> None:
    """Show the compiled pieces on disk, or delete them. Downloaded models are not touched."""
    with errors_as_messages(False):
        _show_cache(folder, clear)


def _show_cache(folder: Path | None, clear: bool) -> None:
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"--folder {folder} is {'a file' if folder.exists() else 'not there'}; name the folder that "
            "SGL_PIECEWISE_CACHE or the option cache_folder names."
        )
    store = CompileCache(folder or default_cache_folder())
    pieces = store.pieces()
    num_bytes = sum(piece.num_bytes for piece in pieces)
    console = Console()
    if clear:
        freed = store.clear()
        console.print(
            Text(f"Deleted {counted(len(pieces), 'piece')}, {in_words_bytes(freed)}, from {store.folder}")
        )
        return
    console.print(Text(f"{counted(len(pieces), 'piece')}, {in_words_bytes(num_bytes)}, in {store.folder}"))
    if pieces:
        console.print(_pieces_table(pieces))


def _pieces_table(pieces: list[StoredPiece]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("piece", "operators", "compiled for"):
        table.add_column(name, overflow="fold")
    for name in ("compiled in", "size", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    now_s = datetime.datetime.now().timestamp()
    for piece in pieces:
        entry = piece.entry
        environment = piece.environment
        devices = [name for key, name in environment.items() if key.startswith("cuda:")] or ["CPU"]
        if entry is None:
            what, took = "no entry that can be read: unfinished or damaged", "-"
        else:
            more = entry.num_operators - len(entry.operators)
            what = ", ".join(entry.operators) + (f" and {more} more" if more > 0 else "")
            took = in_words_s(entry.compile_s)
        table.add_row(
            piece.folder.name[:_MAX_KEY_DIGITS],
            what,
            f"{', '.join(devices)}; torch {environment.get('torch', 'unknown').split(' ')[0]}",
            took,
            in_words_bytes(piece.num_bytes),
            _age(now_s - piece.modified_s),
        )
    return table


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
