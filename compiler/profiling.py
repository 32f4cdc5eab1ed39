"""The backend's own profile: from the begin of Dynamo's trace to the last guard, of every compile of a process.

The backend is called in the middle of a trace. What came before is put on the time line afterwards, and the
time line goes on after the backend has returned, until Dynamo's outermost event ends. This module must not know
what the backend does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sgl_piecewise.runtime import torch_private_events
from sgl_piecewise.runtime.build_profile import check_profile_path, profile_of, write_profile
from sgl_piecewise.runtime.time_line import CONTAINER, TimeLine, start_listening, stop_listening

_finished: dict[Path, list[TimeLine]] = {}


@contextlib.contextmanager
def profile_of_backend(file: str | os.PathLike[str] | None) -> Iterator[None]:
    """Profiles the compile in progress, where a file is given.

    Args:
        file: Gets all compiles of this process that named it, one after the other; None does nothing.

    Raises:
        ConfigError: The file cannot be written.
    """
    if file is None:
        yield
        return
    path = Path(file).absolute()
    check_profile_path(path)
    began_s = torch_private_events.trace_began_s()
    # What is left to do when Dynamo's outermost event ends, or the backend if it was called without Dynamo.
    until_done = contextlib.ExitStack()
    line = TimeLine(began_s, on_idle=lambda: _finish(line, path, until_done))
    until_done.enter_context(torch_private_events.events_to_time_lines())
    until_done.callback(stop_listening, line)
    if began_s is not None:
        torch_private_events.add_events_in_progress(line, began_s)
    start_listening(line)
    own = line.begin("backend", CONTAINER, {})
    try:
        yield
    finally:
        line.end(own)


def _finish(line: TimeLine, path: Path, until_done: contextlib.ExitStack) -> None:
    until_done.close()
    line.finish()
    _finished.setdefault(path, []).append(line)
    write_profile(profile_of(_finished[path], {"strategy": "torch.compile"}), path)
