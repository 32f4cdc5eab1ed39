"""Tests of attention backends: values, independence, captured runs; on the GPU where there is one."""
