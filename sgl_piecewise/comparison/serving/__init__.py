"""What ``benchmarks/serving_qwen3_8b.py`` measures with: calls on one device, and transformers' own batching."""
