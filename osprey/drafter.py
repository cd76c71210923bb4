"""The drafter network, for Osprey and for EAGLE-3.

A position has two streams: the token embedding x and the context c (the projected taps, or the drafter's own
state at later draft steps). `swap_h_and_emb` decides which one is the residual stream: Osprey keeps its
source's, x (eq. 1-3); EAGLE-3 takes c. Wide layers read q, k, v from both, `cat(norm(other), norm(residual))`.
Parameter names are the authors' release's, in which `hidden_norm` belongs to the residual stream.

Shapes: B sequences, T positions read, S positions queried, D width, C = 3 · target width.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb


class Attention(nn.Module):
    def __init__(self, config, width: int):
        super().__init__()
        self.head_dim, bias = config.head_dim, config.attention_bias
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=bias)
        if config.model_type == "qwen3":
            self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def heads(self, x_BTE):
        return x_BTE.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x_BTE, rotary):
        key = self.k_norm(self.heads(self.k_proj(x_BTE)))
        return apply_rotary_pos_emb(key, key, *rotary)[0], self.heads(self.v_proj(x_BTE))

    def forward(self, x_BSE, rotary, keys, values, mask_BST):
        query = self.q_norm(self.heads(self.q_proj(x_BSE)))
        query = apply_rotary_pos_emb(query, query, *rotary)[0]
        keys, values = (states.repeat_interleave(self.groups, dim=1) for states in (keys, values))
        mixed = F.scaled_dot_product_attention(query, keys, values.to(keys.dtype), attn_mask=mask_BST[:, None])
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config, wide: bool):
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size * (2 if wide else 1))
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if wide else None

    def forward(self, residual_BTD, other_BTD, rotary, past, mask_BST, rows):
        if self.hidden_norm is not None:
            x = torch.cat([self.input_layernorm(other_BTD), self.hidden_norm(residual_BTD)], dim=-1)
        else:
            x = self.input_layernorm(residual_BTD)
        keys, values = self.self_attn.keys_values(x, rotary)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        if rows is not None:  # the other positions only serve as keys
            x, residual_BTD, *rotary = (states[rows] for states in (x, residual_BTD, *rotary))
        hidden = residual_BTD + self.self_attn(x, rotary, keys, values, mask_BST)
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), (keys, values)


class Drafter(nn.Module):
    """Built from a Hugging Face config (`llama` or `qwen3`) with the keys of design section 6."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)  # no padding_idx: pad may also be eos
        self.fc = nn.Linear(3 * config.target_hidden_size, width, bias=False)
        # stock multi-layer EAGLE-3 reads both streams in its first layer only
        wide = [config.swap_h_and_emb or index == 0 for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(Layer(config, w) for w in wide)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))  # is the target id drafted?
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))  # target id = d + d2t[d]

    def forward(self, tokens_BT, context_BTD, positions_BT, mask_BTK, past=None, rows=None):
        """One pass: the state *before* the final norm, [B, S, D], and the keys and values so far, by layer.

        `context_BTD` is `fc(taps)` or the state that an earlier pass returned; `mask_BTK` says which of the K keys,
        old ones first, a position may see. With `rows` = (batch index, position index), each [B, S], the last
        layer queries these positions only.
        """
        x_BTD = self.embed_tokens(tokens_BT)
        residual, other = (x_BTD, context_BTD) if self.config.swap_h_and_emb else (context_BTD, x_BTD)
        rotary = self.rotary(x_BTD, positions_BT)
        present = []
        for index, layer in enumerate(self.layers):
            queried = rows if index == len(self.layers) - 1 else None
            mask = mask_BTK if queried is None else mask_BTK[queried]
            residual, keys_values = layer(residual, other, rotary, past and past[index], mask, queried)
            present.append(keys_values)
        return residual, present

    def logits(self, hidden_BSD):
        """Logits over the draft vocabulary, [B, S, draft_vocab_size]."""
        return self.lm_head(self.norm(hidden_BSD))

    def draft(self, hidden_BSD):
        """The greedy draft as target token ids, [B, S]."""
        drafted = self.logits(hidden_BSD).argmax(-1)
        return drafted + self.d2t[drafted]
