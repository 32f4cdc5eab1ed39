"""The KV cache: slots, pools that never move, and the translation from the scheduler's slots to theirs."""
