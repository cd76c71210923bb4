"""What a preset will cost before it runs, from the speeds that the reference machine was measured at."""

from osprey.params import Params

# Seconds on the reference machine, 2 CPU cores, of SmolLM2-135M with a 2-layer backbone; other sizes scale by their
# arithmetic, which is why the estimate is one significant digit and says so.
STAGE = 6  # starting a notebook, importing the libraries, loading a model
MODEL = 25  # dequantising a model
ROLLOUT_TOKENS = 300  # per second, generated in batches
TAP_TOKENS = 2_000  # per second, prompt and response
PROMPT_TOKENS = 120  # of an average prompt
PRETRAIN_TOKENS = 3_000  # per second
DISTILL_TOKENS = 170  # supervised positions per second
REPLAYS = 25  # requests per second


def seconds(params: Params) -> dict[str, float]:
    """Estimated wall-clock seconds of each kind of stage."""
    rollouts, pretrain = params.rollouts, params.pretrain
    requests = len(params.targets) * len(params.domains) * (rollouts.adaptation_prompts + rollouts.held_out_prompts)
    replays = (len(params.runs) + len(params.drafters)) * len(params.domains) * rollouts.held_out_prompts
    return {
        "models": MODEL * len(params.models),
        "pretrain": STAGE + pretrain.steps * pretrain.batch * pretrain.accumulation * pretrain.window / PRETRAIN_TOKENS,
        "rollouts": STAGE * len(params.targets)
        + requests
        * (rollouts.max_new_tokens / ROLLOUT_TOKENS + (PROMPT_TOKENS + rollouts.max_new_tokens) / TAP_TOKENS),
        "distill": len(params.runs) * (STAGE + params.distill.tokens / DISTILL_TOKENS),
        "evaluate": STAGE * len(params.drafters) + replays / REPLAYS,
        "the rest": STAGE * (3 + len(params.drafters)),
    }


def describe(params: Params) -> str:
    """The estimate as lines to print."""
    parts = seconds(params)
    total = sum(parts.values()) / 60
    lines = [f"{len(params.runs)} runs on {len(params.targets)} target(s); about {total:.0f} minutes "
             "if nothing is cached (measured for SmolLM2-135M on 2 CPU cores):"]  # fmt: skip
    return "\n".join(lines + [f"  {stage:12}{cost / 60:6.1f} min" for stage, cost in parts.items()])
