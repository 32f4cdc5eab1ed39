"""The KV cache: slots, pools, plans and capacity."""
