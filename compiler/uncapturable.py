"""What validation found, raised where it matters: when a capture calls the compiled forward.

Compiled code that nobody captures may read values on the host. A capture calls the forward for a warm-up
first, so it learns of all findings before it has recorded anything.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from sgl_piecewise.passes.validate import Finding, refuse_findings
from sgl_piecewise.runtime.mark import active_capture

_logger = logging.getLogger(__name__)


def refusing_capture(forward: Callable[..., Any], findings: Sequence[Finding]) -> Callable[..., Any]:
    """Returns a forward that raises under a capture if it holds what no graph can; the same one if not.

    Args:
        forward: A compiled forward.
        findings: What validation found in it.
    """
    if not findings:
        return forward
    for finding in findings:
        _logger.info("Compiled, but not to be captured: %s", finding)

    @functools.wraps(forward)
    def call(*args: Any) -> Any:
        if active_capture() is not None:
            refuse_findings(findings)
        return forward(*args)

    return call
