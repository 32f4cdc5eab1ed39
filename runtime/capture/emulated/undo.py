"""Makes a recording leave no trace: memory and generators are as they were before it.

The emulated device has to run operators once to learn the shapes of their results. What they
wrote into memory that existed before, and what they drew from generators, is put back when the
recording ends, as if nothing had been executed. This module must not know of operators.
"""

from __future__ import annotations

import ctypes

import torch

from ...errors import CaptureForbiddenError


class MemoryUndo:
    """Contents of storages before a recording first wrote into them."""

    def __init__(self) -> None:
        self._saved: dict[tuple[int, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._saved_bytes: list[tuple[int, bytes]] = []

    def save(self, storage: torch.UntypedStorage) -> None:
        """Keeps the contents of a storage that is about to be written, once."""
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._saved and storage.nbytes():
            self._saved[key] = (storage, storage.clone())

    def save_bytes(self, address: int, num_bytes: int) -> None:
        """Keeps the contents of mapped memory that no storage owns any more."""
        self._saved_bytes.append((address, ctypes.string_at(address, num_bytes)))

    def restore(self) -> None:
        """Puts everything back, last saved first, since storages may overlap."""
        for address, kept in reversed(self._saved_bytes):
            ctypes.memmove(address, kept, len(kept))
        self._saved_bytes.clear()
        for storage, contents in reversed(self._saved.values()):
            storage.copy_(contents)
        self._saved.clear()


class GeneratorUndo:
    """States of the random generators before a recording drew from them.

    Restoring takes back what other threads drew from the same generator meanwhile. Also finds out
    when a generator was seeded by something else than a recorded operator: CUDA refuses that during
    capture, and a recording cannot hold it.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[torch.Generator, torch.Tensor, torch.Tensor]] = {}
        self._watch(torch.default_generator)

    def _watch(self, generator: torch.Generator) -> torch.Tensor:
        """Returns the last known state of a generator; from now on it is restored."""
        if id(generator) not in self._states:
            state = generator.get_state()
            self._states[id(generator)] = (generator, state, state)
        return self._states[id(generator)][2]

    def check(self, generator: torch.Generator) -> None:
        """Raises if the generator was touched since the last recorded draw.

        Raises:
            CaptureForbiddenError: It was seeded or its state was set.
        """
        last = self._watch(generator)
        if torch.equal(last, generator.get_state()):
            return
        if generator is torch.default_generator and not _is_freshly_seeded(generator, last):
            self.note_draw(generator)  # Another thread drew from it.
        else:
            raise CaptureForbiddenError(
                f"A random generator ({generator}) was seeded, or its state was set, while a graph was being "
                "recorded. CUDA refuses this: the seed belongs to the replay, not to the graph. Seed before "
                "the capture or between replays, or in a function marked @eager_on_graph."
            )

    def check_all(self) -> None:
        """Checks every generator that the recording knows of; raises as `check` does."""
        for generator, _, _ in list(self._states.values()):
            self.check(generator)

    def note_draw(self, generator: torch.Generator) -> bool:
        """Takes the generator's state as the last known one; tells whether it had changed."""
        self._watch(generator)
        _, first, last = self._states[id(generator)]
        state = generator.get_state()
        self._states[id(generator)] = (generator, first, state)
        return not torch.equal(last, state)

    def restore(self) -> None:
        """Puts every state back."""
        for generator, first, _ in self._states.values():
            generator.set_state(first)
        self._states.clear()


def _is_freshly_seeded(generator: torch.Generator, last: torch.Tensor) -> bool:
    """Tells whether a generator was seeded since it was in the state ``last``."""
    seed = generator.initial_seed()
    before = torch.Generator()
    before.set_state(last)
    fresh = torch.Generator().manual_seed(seed).get_state()
    return seed != before.initial_seed() or torch.equal(generator.get_state(), fresh)
