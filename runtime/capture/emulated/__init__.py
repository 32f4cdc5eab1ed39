"""CUDA-graph capture imitated on the CPU, so that tests and demos without a GPU mean something.

Records ATen operators, replays them into the same addresses, refuses what CUDA refuses and goes
stale where CUDA goes stale. Its times say nothing about a GPU; reports call it "emulated".
"""

from .device import EmulatedDevice, EmulatedPool

__all__ = ["EmulatedDevice", "EmulatedPool"]
