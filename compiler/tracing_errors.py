"""What Dynamo says when it cannot trace, with the line it stopped at and where a mark would help.

With ``fullgraph=True`` Dynamo raises; `explained_tracing_errors` turns that into an error of this library, for
entries that are ours. Without it Dynamo goes on with what it has, in silence; the backend warns then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule

from sgl_piecewise.runtime import torch_private_compiling
from sgl_piecewise.runtime.capture.user_code import traced_user_line
from sgl_piecewise.runtime.errors import CompileError

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def explained_tracing_errors() -> Iterator[None]:
    """Turns Dynamo's errors in the block into `CompileError`; errors of this library pass as they are.

    Raises:
        CompileError: Dynamo could not trace; the message has its reason, the source line and a way out.
    """
    try:
        yield
    except torch_private_compiling.TRACING_FAILURES as err:
        own = torch_private_compiling.inner_error(err)
        if own is not None:
            raise own from own.__cause__
        reason, stack = torch_private_compiling.failure_reason(err)
        raise CompileError(f"Dynamo cannot trace {_where(reason, stack)}") from err


def warn_of_stopped_trace(gm: GraphModule) -> None:
    """Logs that a trace ends before its function does, so that the rest runs eager or is compiled apart."""
    stopped = torch_private_compiling.stop_of_trace(gm)
    if stopped is not None:
        _logger.warning(
            "Dynamo stopped a trace at %s With fullgraph=True this is an error.", _where(*stopped)
        )


def _where(reason: str, stack: Any) -> str:
    line = traced_user_line("".join(stack.format()) if stack is not None else None)
    function = f" in {line.function}" if line.function else ""
    return (
        f"{line}{function}: {reason.rstrip('.')}. If this call has to stay as it is, move it into a function marked "
        "@eager_on_graph: it then runs between pieces, and is not traced."
    )
