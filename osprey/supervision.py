"""Which (chain, step) pairs of a sequence are taught, and by which position of the target.

Index i holds token x_{i+1}. Step k of the chain at i holds x_{i+1+k} and predicts x_{i+2+k}, taught by the target's
distribution at position i + 1 + k. Taught: chains from the first response token on (i + 1 is its position), and
steps whose held and predicted tokens lie in the same response (design, section 5, Stage 4).
"""

import torch


def chain_starts(response_T: torch.Tensor) -> torch.Tensor:
    """The indices i at which a chain starts whose step 0 predicts a token of its own response, [S], ascending."""
    held, predicted = response_T[1:-1], response_T[2:]
    return torch.nonzero((held > 0) & (held == predicted)).squeeze(-1)


def predicted(response_T: torch.Tensor, starts_S: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token step k of chain s predicts, [K, S] positions (clamped to the sequence), and is it in its response?"""
    position_KS = starts_S + 2 + torch.arange(steps, device=starts_S.device)[:, None]
    within_KS = position_KS < len(response_T)
    position_KS = position_KS.clamp(max=len(response_T) - 1)
    return position_KS, within_KS & (response_T[position_KS] == response_T[starts_S + 1])


def taught_pairs(response_T: torch.Tensor, starts_S: torch.Tensor, steps: int, drafted_T: torch.Tensor) -> torch.Tensor:
    """[K, S] bool: is step k of chain s taught?

    drafted_T: is the target's greedy token at this position in the draft vocabulary? Where it is not, the teacher
    renormalised over that vocabulary would teach something else: not supervised.
    """
    position_KS, inside_KS = predicted(response_T, starts_S, steps)
    return inside_KS & drafted_T[position_KS - 1]
