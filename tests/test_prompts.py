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


def draw(made: params.Domain, adaptation: int, held_out: int, seed: int = 0, **more) -> dict[str, list[str]]:
    return prompts.split("d", made, {"adaptation": adaptation, "held-out": held_out, **more}, seed)


def test_disjoint_seeded_and_not_the_first(many):
    sides = draw(many, 60, 30, validation=30)
    assert [len(side) for side in sides.values()] == [30, 30, 60] and len(set(sum(sides.values(), []))) == 120
    first = [prompt.strip() for prompt in records.texts(many.records[0])][:30]
    assert sides["held-out"] != first and set(sides["held-out"]) != set(first)
    assert sides == draw(many, 60, 30, validation=30)
    assert sides["held-out"] != draw(many, 60, 30, 1)["held-out"]


def test_the_first_prompts_are_the_records_own_and_never_taught(many):
    sides = draw(many, 60, 20, first=10)
    assert sides["first"] == [prompt.strip() for prompt in records.texts(many.records[0])][:10]
    assert set(sides["first"]).isdisjoint(sides["adaptation"]) and len(set(sides["adaptation"])) == 60
    assert sides["held-out"] == draw(many, 60, 20)["held-out"]
    assert "first" not in prompts.split("d", generated("gsm_symbolic"), {"adaptation": 2, "first": 2}, 0)


def test_each_side_ignores_the_others_count(many):
    sides = draw(many, 50, 20, validation=5)
    assert draw(many, 5, 30)["held-out"][:20] == sides["held-out"]
    assert draw(many, 60, 3, validation=9)["adaptation"][:50] == sides["adaptation"]
    assert draw(many, 5, 30, validation=9)["validation"][:5] == sides["validation"]


def test_numbers_and_word_order_make_no_new_prompt(many):
    with pytest.raises(
        UserError, match="domains.d: 100 adaptation prompts are asked for, 99 are left of the 121 there"
    ):
        draw(many, 100, 22)
    with pytest.raises(UserError, match="domains.d: 62 held-out prompts are asked for, 61 are left of the 121 there"):
        draw(many, 1, 62)
    sides = draw(many, 100, 21)
    assert sum("then" in prompt for prompt in sides["adaptation"] + sides["held-out"]) == 1


def test_prompts_without_words_are_kept_apart(tmp_path):
    sides = draw(domain(tmp_path, ["1 + 1", "1 + 2", "1 + 1"]), 1, 1)
    assert sorted(sum(sides.values(), [])) == ["1 + 1", "1 + 2"]


def test_template_takes_braces(tmp_path):
    made = domain(tmp_path, ["what is {x}?", "who is {prompt}?"], template="Q: {prompt}\nThink.")
    assert sorted(sum(draw(made, 1, 1).values(), [])) == ["Q: what is {x}?\nThink.", "Q: who is {prompt}?\nThink."]


def generated(*names) -> params.Domain:
    return params.Domain.model_validate({"records": [{"generate": name} for name in names]})


def test_generated_problems_are_split_by_template():
    sides = draw(generated("gsm_symbolic"), 400, 100, validation=50)
    names = {}
    for problem, _ in zip(records.problems("gsm_symbolic", 0), range(5000), strict=False):
        names[problem["question"]] = frozenset(problem["metadata"]["variables"])
    templates = {side: {names[prompt] for prompt in made} for side, made in sides.items()}
    assert sum(map(len, templates.values())) == len(set().union(*templates.values()))
    assert len(templates["adaptation"]) > 40 and len(templates["held-out"]) > 5 and len(templates["validation"]) > 2
    assert len(set(sum(sides.values(), []))) == 550
    assert draw(generated("gsm_symbolic"), 3, 120)["held-out"][:100] == sides["held-out"]


def test_generators_take_turns():
    sides = draw(generated("gsm_symbolic", "family_relationships"), 60, 20)
    kinds = [("married" in prompt) for prompt in sides["adaptation"]]
    assert 15 < sum(kinds) < 45 and len(set(sum(sides.values(), []))) == 80


def test_too_few_generated(monkeypatch):
    problem = {"metadata": {"source_dataset": "one", "variables": {"x": 1}}}
    monkeypatch.setattr(records, "problems", lambda name, seed: ({**problem, "question": str(i)} for i in range(99)))
    at = records.position(0, "one x")
    assert not 0.2 <= at < 0.3  # the validation share
    side = "held-out" if at < 0.2 else "adaptation"
    other = {"held-out": "adaptation", "adaptation": "held-out"}[side]
    with pytest.raises(UserError, match=f"domains.d: 5 {other} prompts are asked for, its generators gave 0"):
        draw(generated("one"), 5, 5)


def test_generated_and_stored_do_not_mix(many):
    mixed = params.Domain(records=[*many.records, *generated("gsm_symbolic").records])
    with pytest.raises(UserError, match="domains.d.records: .*cannot be mixed"):
        draw(mixed, 1, 1)


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
