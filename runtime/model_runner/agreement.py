"""Ranks that run one batch together decide together: one that cannot replay keeps all from it."""

from __future__ import annotations

import abc


class RankAgreement(abc.ABC):
    """Asks all ranks that share a forward's collectives."""

    @abc.abstractmethod
    def all_can(self, can: bool) -> bool:
        """Returns whether every rank can; a collective call, made once per decision by every rank."""


class SingleRank(RankAgreement):
    """One process: nobody else to ask."""

    def all_can(self, can: bool) -> bool:
        return can
