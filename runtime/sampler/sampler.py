"""Next tokens from logits: greedy, temperature, top-k and top-p, each request by its own parameters.

Every row is computed by itself, so a request's token depends on nothing but its logits, its
parameters and its length. A row with NaN, or without a finite largest logit, gives `INVALID_TOKEN`,
which costs no wait for the device; who brings the tokens to the host turns it into an error that names the request.

Shapes: `B` requests, `V` vocabulary.
"""

from __future__ import annotations

import torch

from ..batch.request import Req
from ..batch.sampling import BatchSampling
from ..errors import SamplingError
from .draws import uniform_draws

INVALID_TOKEN = -1
"""In place of a token, where the logits hold NaN, or their largest is infinite."""


def sample(logits_BV: torch.Tensor, sampling: BatchSampling, lengths_B: torch.Tensor) -> torch.Tensor:
    """Chooses a token for every request.

    Args:
        logits_BV: One row per request; not written to.
        sampling: Parameters of the requests.
        lengths_B: Tokens of each request so far, which count its draws (int64[B]).

    Returns:
        ``token_ids`` (int64[B], fresh); `INVALID_TOKEN` where a row holds NaN or its largest is infinite.
    """
    greedy_B = logits_BV.argmax(-1)
    if sampling.is_all_greedy:
        chosen_B = greedy_B
    else:
        drawn_B = _draw(logits_BV.float(), sampling, lengths_B)
        is_greedy_B = (sampling.temperatures == 0) | (sampling.top_ks == 1)
        chosen_B = torch.where(is_greedy_B, greedy_B, drawn_B)
    # Largest is NaN where any is. Infinite, an overflow would be taken for certainty, and nothing would be left
    # of a row that forbids every token.
    return torch.where(logits_BV.amax(-1).isfinite(), chosen_B, INVALID_TOKEN)


def _draw(logits_BV: torch.Tensor, sampling: BatchSampling, lengths_B: torch.Tensor) -> torch.Tensor:
    num_tokens = logits_BV.shape[-1]
    # No divisor is too small: the largest logit becomes 0 whatever it is divided by, and nothing overflows upwards.
    temperature_B1 = torch.where(sampling.temperatures > 0, sampling.temperatures, 1.0)
    temperature_B1 = temperature_B1.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    # A stable sort: equal logits keep the order of their ids, on every device.
    ordered_BV, ids_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True)
    ordered_BV = (ordered_BV - ordered_BV[:, :1]) / temperature_B1
    rank_V = torch.arange(num_tokens, device=logits_BV.device)
    top_k_B1 = torch.where(sampling.top_ks > 0, sampling.top_ks, num_tokens).unsqueeze(1)
    ordered_BV = ordered_BV.masked_fill(rank_V >= top_k_B1, -torch.inf)
    probability_BV = ordered_BV.softmax(-1)
    before_BV = probability_BV.cumsum(-1) - probability_BV
    # The first token that reaches top_p counts as well, so one is always left.
    kept_BV = probability_BV.masked_fill(before_BV >= sampling.top_ps.unsqueeze(1), 0.0)
    total_BV = kept_BV.cumsum(-1)
    threshold_B1 = uniform_draws(sampling.seeds, lengths_B).unsqueeze(1) * total_BV[:, -1:]
    last_B1 = (kept_BV > 0).sum(-1, keepdim=True) - 1
    index_B1 = torch.minimum((total_BV <= threshold_B1).sum(-1, keepdim=True), last_B1).clamp(min=0)
    return ids_BV.gather(1, index_B1).squeeze(1)


def invalid_logits(req: Req) -> SamplingError:
    """Returns the error for a request whose logits held NaN."""
    return SamplingError(
        f"The logits of request {req.request_id!r} hold NaN, or their largest is infinite, after "
        f"{len(req.token_ids)} tokens, so no token can be chosen. "
        "Other requests are not touched. Run again with a plan that is eager, or in debug "
        "mode, to see whether capture is the cause; then look at the weights and the dtype."
    )
