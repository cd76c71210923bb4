"""What a preset will cost before it runs: its counts times the speeds of the committed laptop run.

The speeds are SmolLM2-135M's on 2 CPU cores (results/timings; tests/test_plan.py holds the estimate to them) and do
not scale with the model: for another one the estimate shows where the time goes, not how much it is.
"""

from osprey.params import Params

STAGE = 6  # seconds to start a notebook, import the libraries and load a model
MODEL = 20  # seconds to dequantise a model
ROLLOUT_TOKENS = 480  # a second, generated in batches; the prompts are in it
PRETRAIN_TOKENS = 2_500  # a second
DISTILL_STARTS = 650  # chain starts a second, the mean of osprey's 550, eagle3-1l's 930 and eagle3-2l's 590
REPLAYS = 22  # requests a second
DECODED = 3  # seconds a request, token by token


def seconds(params: Params) -> dict[str, float]:
    """Estimated wall-clock seconds of each kind of stage."""
    rollouts, pretrain = params.rollouts, params.pretrain
    requests = len(params.targets) * len(params.domains) * sum(rollouts.prompts.values())
    contestants = len(params.runs) + len(params.drafters)
    replays = contestants * len(params.domains) * rollouts.prompts[params.evaluate.split]
    return {
        "models": MODEL * len(params.models),
        "pretrain": STAGE + pretrain.steps * pretrain.batch * pretrain.accumulation * pretrain.window / PRETRAIN_TOKENS,
        "rollouts": STAGE * len(params.targets) + requests * rollouts.max_new_tokens / ROLLOUT_TOKENS,
        "distill": len(params.runs) * (STAGE + params.distill.tokens / DISTILL_STARTS),
        "evaluate": STAGE * len(params.drafters) + replays / REPLAYS,
        "agreement": len(params.targets) * (STAGE + len(params.domains) * params.agreement.requests * DECODED),
        "the rest": STAGE * (3 + len(params.drafters)),
    }


def describe(params: Params) -> str:
    """The estimate as lines to print."""
    parts = seconds(params)
    total = sum(parts.values()) / 60
    lines = [f"{len(params.runs)} runs on {len(params.targets)} target(s); about {total:.0f} minutes "
             "if nothing is cached (measured for SmolLM2-135M on 2 CPU cores):"]  # fmt: skip
    return "\n".join(lines + [f"  {stage:12}{cost / 60:6.1f} min" for stage, cost in parts.items()])
