"""The frozen target's forward: the taps, the last hidden state and the greedy token of every position.

Taps follow EAGLE-3: the *outputs* of 0-based layers 1, n//2 - 1 and n - 4. vLLM names the same states by the
index in `hidden_states` (one more), SGLang by the layer.
"""

import torch

from osprey.params import UserError


def layer_ids(layers: int, explicit: list[int] | None, target: str) -> list[int]:
    """The three 0-based layers whose outputs are tapped, low to high. Raises UserError where there are no three."""
    ids = explicit or [1, layers // 2 - 1, layers - 4]
    mend = f"set targets.{target}.taps to three layers between 0 and {layers - 2}"
    if len(set(ids)) < 3:
        raise UserError(f"targets.{target}: with {layers} layers the taps coincide {ids}; {mend}")
    # the last layer's output only exists after the final norm
    if min(ids) < 0 or max(ids) > layers - 2:
        raise UserError(f"targets.{target}: taps {ids} lie outside the target; {mend}")
    return sorted(ids)


class Recording:
    """While it is entered, keeps taps, last hidden state and greedy token of every pass that the target makes."""

    def __init__(self, model, layers: list[int]):
        self.model, self.layers = model, layers
        self.taps, self.last, self.greedy, self.hooks = [], [], [], []

    def __enter__(self):
        self.hooks = [
            self.model.register_forward_pre_hook(ask_for_states, with_kwargs=True),
            self.model.register_forward_hook(self.keep),
        ]
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def keep(self, model, arguments, output):
        self.taps.append(torch.cat([output.hidden_states[layer + 1] for layer in self.layers], dim=-1).cpu())
        self.last.append(output.hidden_states[-1].cpu())
        self.greedy.append(output.logits[:, -1].argmax(-1).cpu())
        output.hidden_states = None  # or generation would hold every layer's

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """taps [B, T, 3H] and last [B, T, H] of all positions read, greedy [B, passes] after each pass."""
        return torch.cat(self.taps, dim=1), torch.cat(self.last, dim=1), torch.stack(self.greedy, dim=1)


def ask_for_states(model, arguments, kwargs):
    return arguments, kwargs | {"output_hidden_states": True}


@torch.no_grad()
def forward(model, tokens_T: torch.Tensor, layers: list[int]):
    """One forward of the target over a sequence: taps [T, 3H], last hidden state [T, H], greedy token [T].

    The last hidden state is the one that the head reads (after the final norm).
    """
    output = model(tokens_T[None], output_hidden_states=True, use_cache=False)
    taps_TC = torch.cat([output.hidden_states[layer + 1][0] for layer in layers], dim=-1)
    return taps_TC, output.hidden_states[-1][0], output.logits[0].argmax(-1)


@torch.no_grad()
def check_head(model, tokens_BT: torch.Tensor) -> None:
    """Raises UserError unless the target's logits are its head times its last hidden state (capped or not)."""
    output = model(tokens_BT, output_hidden_states=True, use_cache=False)
    logits = model.get_output_embeddings()(output.hidden_states[-1]).float()
    softcap = softcapping(model.config)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if not torch.allclose(logits, output.logits.float(), rtol=0.05, atol=0.05):
        raise UserError(f"{type(model).__name__}: its logits are not its head times its last hidden state")


def softcapping(config) -> float | None:
    return getattr(config.get_text_config(), "final_logit_softcapping", None)
