"""The drafter a second time, one token at a time: plain arithmetic on its parameters, with lists for a cache.

Written from design sections 5 and 6 alone; nothing of osprey is called. Differentiable, so it checks gradients too.
"""

import torch


def norm(x_D, weight_D, epsilon):
    return weight_D * x_D / (x_D.square().mean() + epsilon).sqrt()


def rotate(x_D, position: int, theta: float):
    """Rotary embedding of one head: dimension d is paired with dimension d + D/2."""
    half = len(x_D) // 2
    turned = []
    for d in range(half):
        angle = torch.tensor(position * theta ** (-d / half))
        turned.append((x_D[d], x_D[d + half], angle.cos(), angle.sin()))
    first, second = ([a * cos - b * sin for a, b, cos, sin in turned], [b * cos + a * sin for a, b, cos, sin in turned])
    return torch.stack(first + second)


def read(drafter, token: int, context_D, position: int, cache: list[list]):
    """The state, before the final norm, after one more token; appends this token's keys and values to the cache.

    `cache` has one list per layer, of (keys, values), each a list of one vector per key-value head.
    """
    weights, config = dict(drafter.named_parameters()), drafter.config
    epsilon, theta, size = config.rms_norm_eps, config.rope_parameters["rope_theta"], config.head_dim
    embedding_D = weights["embed_tokens.weight"][token]
    residual, other = (embedding_D, context_D) if config.swap_h_and_emb else (context_D, embedding_D)
    for index in range(config.num_hidden_layers):
        own = {n.removeprefix(f"layers.{index}."): w for n, w in weights.items() if n.startswith(f"layers.{index}.")}

        def heads(kind, x):
            made = own[f"self_attn.{kind}_proj.weight"] @ x
            if f"self_attn.{kind}_proj.bias" in own:
                made = made + own[f"self_attn.{kind}_proj.bias"]
            made = made.split(size)
            if kind != "v" and f"self_attn.{kind}_norm.weight" in own:
                made = [norm(head, own[f"self_attn.{kind}_norm.weight"], epsilon) for head in made]
            return made if kind == "v" else [rotate(head, position, theta) for head in made]

        if config.swap_h_and_emb or index == 0:
            x = torch.cat([
                norm(other, own["input_layernorm.weight"], epsilon), norm(residual, own["hidden_norm.weight"], epsilon),
            ])  # fmt: skip
        else:
            x = norm(residual, own["input_layernorm.weight"], epsilon)
        queries = heads("q", x)
        cache[index].append((heads("k", x), heads("v", x)))
        mixed = []
        for head, query in enumerate(queries):
            shared = head * config.num_key_value_heads // config.num_attention_heads
            scores = torch.stack([query @ keys[shared] for keys, _ in cache[index]]) / size**0.5
            shares = scores.exp() / scores.exp().sum()
            mixed.append(sum(share * values[shared] for share, (_, values) in zip(shares, cache[index])))
        residual = residual + own["self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = norm(residual, own["post_attention_layernorm.weight"], epsilon)
        gate = own["mlp.gate_proj.weight"] @ x
        residual = residual + own["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * (own["mlp.up_proj.weight"] @ x))
    return residual


def logits(drafter, state_D):
    weights = dict(drafter.named_parameters())
    return weights["lm_head.weight"] @ norm(state_D, weights["norm.weight"], drafter.config.rms_norm_eps)


def chain(drafter, tokens: list[int], taps_TC, start: int, steps: int):
    """The state of every draft step of one chain, as a server computes it: it reads up to `start`, then drafts.

    Reading index i: the token after position i, with the projected taps of i. A draft step reads the next token with
    the state of the step before: the sequence's own token, and the chain ends where the sequence does.
    """
    weights = dict(drafter.named_parameters())
    cache = [[] for _ in range(drafter.config.num_hidden_layers)]
    for i in range(start + 1):
        state = read(drafter, tokens[i + 1], weights["fc.weight"] @ taps_TC[i], i, cache)
    states = [state]
    for k in range(1, steps):
        if start + 1 + k >= len(tokens):
            break
        states.append(read(drafter, tokens[start + 1 + k], states[-1], start + k, cache))
    return states
