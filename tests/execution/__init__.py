"""The execution layer: plans, runners, model runner, worker and engine, on a tiny model."""
