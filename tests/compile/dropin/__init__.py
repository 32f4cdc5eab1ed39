"""Drop-in use: a model that was only compiled gets graphs, and behaves as if it had not."""
