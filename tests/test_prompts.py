"""Held-out prompts never were adaptation prompts, not even with other numbers; the response starts where it should."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from osprey import params, prompts, records
from osprey.params import UserError

WORDS = "north south east west red blue green gold salt iron wood wool fish bread stone glass".split()


def domain(tmp_path, lines, **keys) -> params.Domain:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"q": line}) + "\n" for line in lines))
    return params.Domain.model_validate({"records": [{"path": str(tmp_path / "q.jsonl"), "field": "q"}], **keys})


@pytest.fixture
def many(tmp_path) -> params.Domain:
    lines = [f"Why {a} {b}? " for a in WORDS for b in WORDS if a < b]  # 120 of them
    return domain(tmp_path, lines + ["Why 2 east fish, then?", "why fish (east), then 3", "why south red?", " "])


def test_disjoint_seeded_and_not_the_first(many):
    adaptation, held_out = prompts.split("d", many, 90, 30, 0)
    assert len({*adaptation, *held_out}) == 120
    first = [prompt.strip() for prompt in records.texts(many.records[0])][:30]
    assert held_out != first and set(held_out) != set(first)
    assert (adaptation, held_out) == prompts.split("d", many, 90, 30, 0)
    assert held_out != prompts.split("d", many, 90, 30, 1)[1]


def test_each_side_ignores_the_others_count(many):
    adaptation, held_out = prompts.split("d", many, 50, 20, 0)
    assert prompts.split("d", many, 5, 30, 0)[1][:20] == held_out
    assert prompts.split("d", many, 60, 3, 0)[0][:50] == adaptation


def test_numbers_and_word_order_make_no_new_prompt(many):
    with pytest.raises(UserError, match="domains.d: 100 adaptation and 22 held-out prompts .* there are 121"):
        prompts.split("d", many, 100, 22, 0)
    adaptation, held_out = prompts.split("d", many, 100, 21, 0)
    assert sum("then" in prompt for prompt in adaptation + held_out) == 1


def test_prompts_without_words_are_kept_apart(tmp_path):
    assert sorted(sum(prompts.split("d", domain(tmp_path, ["1 + 1", "1 + 2", "1 + 1"]), 1, 1, 0), [])) == [
        "1 + 1",
        "1 + 2",
    ]


def test_template_takes_braces(tmp_path):
    made = domain(tmp_path, ["what is {x}?", "who is {prompt}?"], template="Q: {prompt}\nThink.")
    adaptation, held_out = prompts.split("d", made, 1, 1, 0)
    assert sorted(adaptation + held_out) == ["Q: what is {x}?\nThink.", "Q: who is {prompt}?\nThink."]


def generated(*names) -> params.Domain:
    return params.Domain.model_validate({"records": [{"generate": name} for name in names]})


def test_generated_problems_are_split_by_template():
    adaptation, held_out = prompts.split("math", generated("gsm_symbolic"), 400, 100, 0)
    names = {}
    for problem, _ in zip(records.problems("gsm_symbolic", 0), range(5000), strict=False):
        names[problem["question"]] = frozenset(problem["metadata"]["variables"])
    templates = [{names[prompt] for prompt in side} for side in (adaptation, held_out)]
    assert templates[0].isdisjoint(templates[1]) and len(templates[0]) > 40 and len(templates[1]) > 5
    assert len({*adaptation, *held_out}) == 500
    assert prompts.split("math", generated("gsm_symbolic"), 3, 120, 0)[1][:100] == held_out


def test_generators_take_turns():
    adaptation, held_out = prompts.split("mixed", generated("gsm_symbolic", "family_relationships"), 60, 20, 0)
    kinds = [("married" in prompt) for prompt in adaptation]
    assert 15 < sum(kinds) < 45 and len({*adaptation, *held_out}) == 80


def test_too_few_generated(monkeypatch):
    problem = {"metadata": {"source_dataset": "one", "variables": {"x": 1}}}
    monkeypatch.setattr(records, "problems", lambda name, seed: ({**problem, "question": str(i)} for i in range(99)))
    side = "held-out" if records.position(0, "one x") < 0.2 else "adaptation"
    other = {"held-out": "adaptation", "adaptation": "held-out"}[side]
    with pytest.raises(UserError, match=f"domains.d: 5 {other} prompts are asked for, its generators gave 0"):
        prompts.split("d", generated("one"), 5, 5, 0)


def test_generated_and_stored_do_not_mix(many):
    mixed = params.Domain(records=[*many.records, *generated("gsm_symbolic").records])
    with pytest.raises(UserError, match="domains.d.records: .*cannot be mixed"):
        prompts.split("d", mixed, 1, 1, 0)


TURNS = "{% for m in messages %}<turn> {{ m.role }} {{ m.content }} <end> {% endfor %}"
OPEN = "{% if add_generation_prompt %}<turn> assistant{% endif %}"
VOCABULARY = "<bos> <turn> <end> user system assistant hello be kind Question : Answer".split()


def tokenizer(template: str | None, bos: bool = False) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(":", "isolated")]
    )
    if bos:
        words.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<end>")
    made.chat_template = template
    return made


def spelled(ids) -> str:
    return " ".join(VOCABULARY[number] for number in ids)


def test_render_ends_where_the_response_starts():
    made = tokenizer(TURNS + OPEN, bos=True)
    assert spelled(prompts.render(made, "hello", None)) == "<turn> user hello <end> <turn> assistant"
    assert (
        spelled(prompts.render(made, "hello", "be kind"))
        == "<turn> system be kind <end> <turn> user hello <end> <turn> assistant"
    )


def test_render_without_a_template():
    assert spelled(prompts.render(tokenizer(None), "hello", None)) == "Question : hello Answer :"
    assert spelled(prompts.render(tokenizer(None, bos=True), "hello", "be kind")) == (
        "<bos> be kind Question : hello Answer :"
    )


def test_templates_that_cannot_be_used():
    with pytest.raises(UserError, match="ignores add_generation_prompt"):
        prompts.render(tokenizer(TURNS), "hello", None)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TURNS + OPEN
    assert prompts.render(tokenizer(refuses), "hello", None)
    with pytest.raises(UserError, match="no system role; leave the target's system out"):
        prompts.render(tokenizer(refuses), "hello", "be kind")
