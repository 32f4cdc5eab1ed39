"""What a forward is for: nine modes, one table of their properties, predicates read from it.

Nothing else in the library lists modes by hand; what depends on the mode is a property here.

Source: the modes and the meaning of the predicates are SGLang's (0.5.23, `forward_batch_info`).
Differs: they are columns of one table, and a test walks through it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class NewTokens(enum.Enum):
    """How many new tokens a mode computes for each request."""

    NONE = "none"
    ONE = "one"
    FIXED = "fixed"
    """The same number for every request, more than one as a rule: draft tokens, a block."""
    RAGGED = "ragged"
    """Another number for every request."""


@dataclass(frozen=True, kw_only=True)
class ModeProperties:
    """One row of the table.

    Attributes:
        new_tokens: How many tokens a request computes in one forward.
        is_extend: Attention reads a prefix and several new tokens; a forward has the extend fields.
        is_cuda_graph: The decode runner's graphs may serve it, in a target model.
        is_cpu_graph: A compiled CPU forward may serve it.
    """

    new_tokens: NewTokens
    is_extend: bool = False
    is_cuda_graph: bool = False
    is_cpu_graph: bool = False


class ForwardMode(enum.Enum):
    """What a forward is for."""

    EXTEND = "extend"
    """New tokens of prompts, after a prefix that is in the cache already (which may be empty)."""
    DECODE = "decode"
    """One token for every request."""
    MIXED = "mixed"
    """Chunks of prompts and decoding requests in one batch."""
    IDLE = "idle"
    """No request; other ranks have some, and this one takes part in their collectives."""
    TARGET_VERIFY = "target_verify"
    """The target model checks draft tokens, equally many for every request."""
    DRAFT_EXTEND_V2 = "draft_extend_v2"
    """The draft model catches up with what was verified, equally many rows for every request."""
    PREBUILT = "prebuilt"
    """Requests whose KV came from elsewhere; nothing is computed."""
    SPLIT_PREFILL = "split_prefill"
    """A prefill that runs some of the layers at a time."""
    DLLM_EXTEND = "dllm_extend"
    """A diffusion language model rewrites a block of tokens in place."""

    # By identity: modes are looked up many times in every step, and `Enum` hashes names in Python.
    __hash__ = object.__hash__

    @property
    def properties(self) -> ModeProperties:
        """This mode's row of the table."""
        return _TABLE[self]

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """Whether requests bring several new tokens after a prefix.

        Args:
            include_draft_extend_v2: Count DRAFT_EXTEND_V2 too, which is an extend to attention
                and a decode to the graph runners.
        """
        return self.properties.is_extend or (include_draft_extend_v2 and self.is_draft_extend_v2())

    def is_extend_without_speculative(self) -> bool:
        """Whether this is an extend that checks no draft."""
        return self.is_extend() and not self.is_target_verify()

    def is_cuda_graph(self, include_draft_extend_v2: bool = False) -> bool:
        """Whether the decode runner's graphs may serve this mode.

        Args:
            include_draft_extend_v2: Count DRAFT_EXTEND_V2 too, whose graphs are a draft model's and have
                the shapes of TARGET_VERIFY's.
        """
        return self.properties.is_cuda_graph or (include_draft_extend_v2 and self.is_draft_extend_v2())

    def is_cpu_graph(self) -> bool:
        """Whether a compiled CPU forward may serve this mode."""
        return self.properties.is_cpu_graph

    def is_decode_or_idle(self) -> bool:
        """Whether this is DECODE or IDLE."""
        return self is ForwardMode.DECODE or self is ForwardMode.IDLE

    def is_decode(self) -> bool:
        """Whether this is DECODE."""
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        """Whether this is MIXED."""
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        """Whether this is IDLE."""
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        """Whether this is TARGET_VERIFY."""
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        """Whether this is DRAFT_EXTEND_V2."""
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_prebuilt(self) -> bool:
        """Whether this is PREBUILT."""
        return self is ForwardMode.PREBUILT

    def is_split_prefill(self) -> bool:
        """Whether this is SPLIT_PREFILL."""
        return self is ForwardMode.SPLIT_PREFILL

    def is_dllm_extend(self) -> bool:
        """Whether this is DLLM_EXTEND."""
        return self is ForwardMode.DLLM_EXTEND


def _row(
    new_tokens: NewTokens, *, extend: bool = False, cuda_graph: bool = False, cpu_graph: bool = False
) -> ModeProperties:
    return ModeProperties(
        new_tokens=new_tokens, is_extend=extend, is_cuda_graph=cuda_graph, is_cpu_graph=cpu_graph
    )


_TABLE: dict[ForwardMode, ModeProperties] = {
    ForwardMode.EXTEND: _row(NewTokens.RAGGED, extend=True),
    ForwardMode.DECODE: _row(NewTokens.ONE, cuda_graph=True, cpu_graph=True),
    ForwardMode.MIXED: _row(NewTokens.RAGGED, extend=True),
    ForwardMode.IDLE: _row(NewTokens.NONE, cuda_graph=True),
    ForwardMode.TARGET_VERIFY: _row(NewTokens.FIXED, extend=True, cuda_graph=True),
    ForwardMode.DRAFT_EXTEND_V2: _row(NewTokens.FIXED),
    ForwardMode.PREBUILT: _row(NewTokens.NONE),
    ForwardMode.SPLIT_PREFILL: _row(NewTokens.RAGGED, extend=True),
    ForwardMode.DLLM_EXTEND: _row(NewTokens.FIXED, extend=True, cuda_graph=True),
}


class CaptureHiddenMode(enum.IntEnum):
    """Which hidden states a forward hands out; a larger mode serves every smaller one."""

    NULL = 0
    LAST = 1
    """Those of each request's last token."""
    FULL = 2
    """Those of every token."""
