"""Tests of the fused kernels: every set against plain torch, alone and inside graphs."""
