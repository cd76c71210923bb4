"""The explorer's pictures against decoding token by token and slow counting; its notebook on tiny models."""

import ast
import json
import shutil
from html.parser import HTMLParser

import overfitted
import pandas as pd
import pytest
import torch
from walk import ROOT

from osprey import align, checkpoint, decode, explore, models, params, pictures, prompts, rollouts, stages, taps
from osprey.params import Source, UserError

NOTEBOOK = ROOT / "notebooks/explore.ipynb"
SMOKE = params.load(ROOT / "presets/smoke.yaml")
SMOKE = SMOKE.model_copy(update={"source": Source(model="small")})
STEPS, TOKENS, TAPS = 5, 24, overfitted.TAPS
ROLLOUTS = SMOKE.rollouts.model_copy(update={"precision": "fp32", "max_new_tokens": TOKENS})
P = SMOKE.model_copy(update={"rollouts": ROLLOUTS})


class Page(HTMLParser):
    """The tags of a picture, and each token of its texts: a list a text of (classes, title, text content)."""

    def __init__(self, picture):
        super().__init__()
        self.open, self.tags, self.texts = [], set(), []
        self.feed(picture.data)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.add(tag)
        if tag == "wbr":  # has no end
            return
        self.open.append(given.get("class", "").split())
        if "text" in self.open[-1]:
            self.texts.append([])
        elif "t" in self.open[-1] and self.inside("text"):
            self.texts[-1].append([self.open[-1][1:], given["title"], ""])

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        if self.inside("text"):
            assert self.inside("t"), "text outside any token"
            self.texts[-1][-1][2] += data

    def inside(self, name):
        return any(name in classes for classes in self.open)

    def content(self, number=0):
        return "".join(text for _, _, text in self.texts[number])

    def kinds(self, number=0):
        return [kind for classes, _, _ in self.texts[number] for kind in classes]


@pytest.fixture(scope="module")
def root(tmp_path_factory, target_folder, source_folder, target, make_pruned, make_converted, make_drafter):
    """What the stages would have made, from a source of another width. Chat runs are overfitted, math runs noise."""
    root = tmp_path_factory.mktemp("outputs")
    shutil.copytree(target_folder, root / "data/models/tiny")
    shutil.copytree(source_folder, root / "data/models/small")
    shutil.copytree(make_pruned(source_folder), root / "data/pretrained/backbone")
    for recipe, interface, layers in (("osprey", "osprey", 2), ("eagle3-1l", "eagle3", 1)):
        shutil.copytree(make_converted(interface, layers=layers), root / f"data/converted/tiny-{recipe}")
        drafters = {
            "chat": overfitted.drafter(make_drafter, target, interface),
            "math": make_drafter(interface, layers=layers),
        }
        for domain, drafter in drafters.items():
            folder = root / f"data/drafters/tiny/{recipe}/tiny-{recipe}-{domain}"
            folder.mkdir(parents=True)
            checkpoint.save(drafter, folder)
    return root


@pytest.fixture(scope="module")
def desk(root):
    return explore.open_target(P, "tiny", root)


@pytest.fixture(scope="module")
def drafters(desk):
    return explore.open_drafters(desk, ["osprey", "eagle3-1l"], "chat")


def recorded(target, prompt: list[int], made: list[int]) -> rollouts.Response:
    """A response that the target may or may not have given, with its taps."""
    tokens_T, mask_T = torch.tensor(prompt + made), torch.tensor([0] * len(prompt) + [1] * len(made))
    taps_TC, last_TH, greedy_T = taps.forward(target, tokens_T, TAPS)
    return rollouts.Response(tokens_T, mask_T, greedy_T, taps_TC, last_TH)


def trace(kinds: str, accepted=(), steps=STEPS) -> explore.Trace:
    """A trace by hand, one letter a token."""
    names = {"p": "prefill", "a": "accepted", "c": "correction", "b": "bonus"}
    step_of, drafts = [0], [[7] * steps for _ in accepted]
    for step, run in enumerate(accepted, start=1):
        step_of += [step] * (run + 1)
    return explore.Trace("by hand", steps, list(accepted), drafts, [names[k] for k in kinds], step_of[: len(kinds)])


# Marks


def test_marks_are_what_decoding_accepts(desk, drafters, target):
    """Each kind as often, and every token of the kind, that token-by-token speculation gives."""
    seen = []
    for prompt in overfitted.SEEN + overfitted.UNSEEN:
        for limit in (2, 14, TOKENS):
            [response] = rollouts.generate(target, [prompt], TAPS, 0.0, limit, [511], 0)
            traces = explore.replay(desk, drafters, response)
            page = Page(pictures.side_by_side(desk, response, traces))
            for number, (recipe, (drafter, _)) in enumerate(drafters.items()):
                tokens, _, accepted = decode.speculate(target, drafter, TAPS, prompt, STEPS, limit, [511])
                assert tokens == explore.answer(response)
                expected = ["prefill"]
                for run in accepted:
                    expected += ["accepted"] * run
                    if len(expected) < len(tokens):
                        expected.append("bonus" if run == STEPS else "correction")
                kinds = page.kinds(number)
                assert kinds == expected
                assert kinds.count("accepted") == sum(accepted)
                assert kinds.count("accepted") + kinds.count("correction") + kinds.count("bonus") == len(tokens) - 1
                seen += kinds
    assert min(map(seen.count, ("accepted", "correction", "bonus"))) > 5


def test_a_correction_tells_what_was_drafted_in_its_place(desk, drafters, target):
    """Drafted again, alone: the chain up to the miss, whose next draft is not the target's token."""
    drafter, _ = drafters["osprey"]
    prompt, told = overfitted.SEEN[0], 0
    [response] = rollouts.generate(target, [prompt], TAPS, 0.0, TOKENS, [511], 0)
    made = explore.trace(drafter, response, STEPS, "fp32")
    tokens = response.tokens.tolist()
    titles = pictures.tell(desk.own, explore.answer(response), made)
    for place, kind in enumerate(made.kinds):
        if kind == "correction":
            run = made.accepted[made.step_of[place] - 1]
            begin = len(prompt) + place - run - 1  # the chain's last token in hand
            context, held = drafter.fc(response.taps[:begin].float())[None], tokens[1 : begin + 1]
            for step in range(run + 1):
                index = torch.arange(context.shape[1])
                hidden, _ = drafter(torch.tensor([held]), context, index[None], (index[:, None] >= index)[None])
                draft = int(drafter.draft(hidden[:, -1:]))
                context, held = torch.cat([context, hidden[:, -1:]], dim=1), held + [draft]
            assert draft != tokens[len(prompt) + place]
            assert titles[place].endswith(f"drafted was {align.show(desk.own, draft)}")
            assert f"run length {run} of {STEPS}" in titles[place]
            told += 1
    assert told > 3


def test_titles(desk):
    ids, made = [300, 301, 302, 303, 304, 305], trace("paacca", [2, 0, 1])
    shown = [align.show(desk.own, i) for i in ids]
    assert pictures.tell(desk.own, ids, made) == [
        f"{shown[0]} is from the prefill",
        f"step 1, run length 2 of 5: {shown[1]} is draft 1",
        f"step 1, run length 2 of 5: {shown[2]} is draft 2",
        f"step 1, run length 2 of 5: {shown[3]} is the target's; drafted was {align.show(desk.own, 7)}",
        f"step 2, run length 0 of 5: {shown[4]} is the target's; drafted was {align.show(desk.own, 7)}",
        f"step 3, run length 1 of 5: {shown[5]} is draft 1",
    ]
    bonus = pictures.tell(desk.own, ids[:3], trace("pab", [1], steps=1))[2]
    assert bonus == f"step 1, run length 1 of 1: {shown[2]} is the target's, after all the drafts"


def test_where_two_drafters_differ():
    one, other = trace("paacaaaaabca"), trace("pcaaaccabcab")
    assert explore.compare(one, other) == ["", "one", "", "other", "", "one", "one", "", "", "", "other", ""]
    assert explore.compare(other, one) == ["", "other", "", "one", "", "other", "other", "", "", "", "one", ""]
    assert explore.compare(one, one) == [""] * 12


def test_differences_are_marked_on_the_text(desk):
    one, other = trace("paacc", [2, 0]), trace("pccca", [0, 0, 0, 1])
    response = rollouts.Response(torch.tensor([9, 5, 6, 7, 8, 10]), torch.tensor([0, 1, 1, 1, 1, 1]), None, None, None)
    picture = pictures.differences(desk, response, {"first": one, "<second>": other})
    page = Page(picture)
    assert [classes for classes, _, _ in page.texts[0]] == [[], ["one"], ["one"], [], ["other"]]
    titles = pictures.tell(desk.own, [5, 6, 7, 8, 10], one), pictures.tell(desk.own, [5, 6, 7, 8, 10], other)
    assert [title for _, title, _ in page.texts[0]] == [f"first: {a}\n<second>: {b}" for a, b in zip(*titles)]
    assert "only first drafted it rightly: 2" in picture.data
    assert "only &lt;second&gt; drafted it rightly: 1" in picture.data


def test_acceptance_by_position():
    whole, cut = trace("paaccaaaaab", [2, 0, 5]), trace("pcaa", [0, 2])
    cells = pictures.acceptance({"<a>": whole, "b": cut}).data
    assert [f"{n} of 3" in cells for n in range(4)] == [False, True, True, False]  # 2, 2, 1, 1, 1
    assert cells.count("2 of 3") == 2 and cells.count("1 of 3") == 3
    assert cells.count("1 of 2") == 2 and "0 of 1" in cells and cells.count("0 of 0") == 2  # two tokens are left
    assert cells.count("0.67") == 2 and cells.count("0.33") == 3 and cells.count("0.50") == 2
    assert "<a>" not in cells and "&lt;a&gt;" in cells


# Text

TEXT = "Näh, 🦅🦅 </span><script>alert('&amp;')</script>\n\n    def f(x):\treturn \"x\" $5 and $6 \n"


def pages(desk, drafters, target, ids):
    response = recorded(target, [5, 70, 211], ids)
    traces = explore.replay(desk, drafters, response)
    return [Page(picture(desk, response, traces)) for picture in (pictures.side_by_side, pictures.differences)]


def test_the_text_is_the_response_s(desk, drafters, target):
    ids = desk.tokenizer(TEXT, add_special_tokens=False)["input_ids"] + desk.eos[:1]
    assert desk.tokenizer.decode(ids) == TEXT + "<|im_end|>"
    beside, differences = pages(desk, drafters, target, ids)
    assert len(beside.texts) == 2 and len(differences.texts) == 1
    for page in (beside, differences):
        assert page.tags == {"style", "div", "span", "i", "wbr"} | ({"b"} if page is beside else set())
        for number, tokens in enumerate(page.texts):
            assert len(tokens) == len(ids) and page.content(number) == TEXT + "<|im_end|>"
    fragments = [title for _, title, text in differences.texts[0] if not text]
    assert len(fragments) >= 6 and all("\ufffd" not in title for title in fragments)  # of two eagles


def test_bytes_that_are_no_text(desk, drafters, target):
    """Random tokens: invalid and unfinished UTF-8, control characters, special tokens."""
    generator = torch.Generator().manual_seed(0)
    special = {i for i, spelled in enumerate(desk.own.bytes) if spelled is None}
    for _ in range(5):
        ids = [i for i in torch.randint(512, (80,), generator=generator).tolist() if i not in special]
        eagle = desk.tokenizer("🦅", add_special_tokens=False)["input_ids"]
        written = pictures.written(desk.own, ids + eagle[:-1])
        spelled = b"".join(desk.own.bytes[i] for i in ids + eagle[:-1])
        assert spelled.decode(errors="replace").count("\ufffd") > 3
        expected = spelled.decode("utf-8", "backslashreplace")
        shown = {0x2400 + code: code for code in (*range(9), *range(11, 32))} | {0x2421: 0x7F}
        assert "".join(written).translate(shown) == expected and "\ufffd" not in expected
        assert not any(ord(char) < 32 and char not in "\t\n" for char in "".join(written))
        for page in pages(desk, drafters, target, ids + eagle[:-1]):
            assert page.content() == "".join(written)
    between = pictures.written(desk.own, [*eagle[:-1], 2, *eagle, 1])
    assert "".join(between) == "\\xf0\\x9f\\xa6<|im_end|>🦅<|im_start|>" and between[len(eagle) - 1] == "<|im_end|>"


# Source rows


def test_alignment_lines_are_found_by_target_id(tmp_path):
    own = align.Alignment(["shared", "mean", "special", "padding"], [[3], [1, 0, 1], [], []], [0, 1, 2, 3])
    tokens = ['a"b,\nc', "<é>", "<s>"]
    target = align.Vocabulary(tokens, [tokens[0].encode(), tokens[1].encode(), None], set(), {}, {2}, " ")
    lines = ["target_id,token,provenance,source_ids,source_tokens", '1,"\'<é>\'",mean,1 0 1,"\'<\' \'é\' \'<\'"',
             "0,\"'a\"\"b,\nc'\",shared,3,''", "3,,padding,,", "2,<s>,special,all,"]  # fmt: skip
    (tmp_path / "alignment.csv").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    found = explore.alignment(tmp_path / "alignment.csv", [2, 0, 1])
    assert [line["provenance"] for line in found] == [own.provenance[i] for i in (2, 0, 1)]
    assert [line["token"] for line in found] == ["<s>", "'a\"b,\nc'", align.show(target, 1)]
    assert [line["source_ids"] for line in found] == ["all", "3", "1 0 1"]


def test_nearest_rows():
    weight_SD = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    row_D = weight_SD[3] * 2 + 0.1
    cosines = {s: float(torch.dot(w, row_D) / (w.norm() * row_D.norm())) for s, w in enumerate(weight_SD)}
    best = sorted(cosines, key=cosines.get, reverse=True)[:4]
    found = explore.nearest(row_D, weight_SD, 4)
    assert [s for s, _ in found] == best and best[0] == 3
    assert [cosine for _, cosine in found] == pytest.approx([cosines[s] for s in best], abs=1e-5)


def test_source_rows_shows_the_lines_of_the_tokens(desk, drafters, root, monkeypatch):
    text = "solve <td>it, solve <td>it"
    ids = desk.tokenizer(text, add_special_tokens=False)["input_ids"]
    picture = pictures.source_rows(desk, drafters, "osprey", text, count=2)
    lines = pd.read_csv(root / "data/converted/tiny-osprey/alignment.csv", keep_default_na=False).set_index("target_id")
    assert "<td>" not in picture.data and picture.data.count("shared") == len(set(ids)) < len(ids)
    for i in ids:
        assert f"{pictures.boxed(lines.token[i])} {i}<" in picture.data

    keys = ["target_id", "token", "provenance", "source_ids", "source_tokens"]
    lines = [["5", "<5>", "mean", "8 9", "'&' 'x'"], ["6", "", "padding", "", ""]]
    monkeypatch.setattr(explore, "alignment", lambda file, ids: [dict(zip(keys, line)) for line in lines])
    shown, spelled = pictures.source_rows(desk, drafters, "osprey", text, count=2).data, pictures.boxed("'&' 'x'")
    assert f"{pictures.boxed('<5>')} 5</div><div>mean</div><div>{spelled} 8 9</div>" in shown
    assert "<div>padding</div><div></div>" in shown
    assert pictures.boxed("<5>") == '<span class="token">&lt;5&gt;</span>'


# A new domain


def test_a_new_domain_is_measured_as_decoding_would(desk, target, monkeypatch):
    texts = overfitted.SEEN[:2] + overfitted.UNSEEN[:1]
    monkeypatch.setattr(prompts, "render", lambda tokenizer, text, system: texts[int(text)])
    table = explore.new_domain(desk, ["0", "1", "2"])
    assert table.index.tolist() == ["osprey", "eagle3-1l"]
    assert table.columns.tolist() == ["undistilled", "chat", "math", "best"]
    for recipe in table.index:
        for column in ("undistilled", "chat", "math"):
            folder = f"drafters/tiny/{recipe}/tiny-{recipe}-{column}"
            folder = f"converted/tiny-{recipe}" if column == "undistilled" else folder
            drafter, lengths = checkpoint.load(desk.root / "data" / folder), []
            for prompt in texts:
                tokens, _, accepted = decode.speculate(target, drafter, TAPS, prompt, STEPS, TOKENS, desk.eos)
                lengths.append((len(tokens) - 1) / len(accepted))
            assert table.loc[recipe, column] == round(sum(lengths) / 3, 3)
        assert table.best[recipe] == "chat" and table.chat[recipe] > 1.5 > table.math[recipe]


# Mistakes


def changed(desk, **rollout):
    section = ROLLOUTS.model_copy(update=rollout)
    return explore.Desk(**(vars(desk) | {"params": P.model_copy(update={"rollouts": section})}))


def test_mistakes_are_one_clear_line(desk, drafters, tmp_path):
    bare = explore.Desk(**(vars(desk) | {"root": tmp_path}))
    drafter = "data/drafters/tiny/osprey/tiny-osprey-chat"
    mistakes = {
        "target: 'big' is not among targets in params.yaml (tiny)": lambda: explore.open_target(P, "big", desk.root),
        "data/models/tiny: no such file; make it with dvc repro": lambda: explore.open_target(P, "tiny", tmp_path),
        f"{drafter}: no such file; make it with dvc repro": lambda: explore.open_drafters(bare, ["osprey"], "chat"),
        "runs: tiny has no osprey drafter adapted on 'law' in params.yaml (it has chat, math)":
            lambda: explore.open_drafters(desk, ["osprey"], "law"),
        "runs: tiny has no dflash drafter adapted on 'chat' in params.yaml (it has none)":
            lambda: explore.open_drafters(desk, ["dflash"], "chat"),
        "data/converted/tiny-osprey/alignment.csv: no such file; make it with dvc repro":
            lambda: pictures.source_rows(bare, drafters, "osprey", "x"),
        "recipe 'eagle3-1l': its drafters take no rows from a source; name one with a pretrained body":
            lambda: pictures.source_rows(desk, drafters, "eagle3-1l", "x"),
        "recipe 'mine': its drafters take no rows from a source; name one with a pretrained body":
            lambda: pictures.source_rows(desk, drafters, "mine", "x"),
        "data/converted/tiny-osprey: no such file; make it with dvc repro": lambda: explore.new_domain(bare, ["x"]),
        "prompts: no response has two tokens, so there is nothing to draft; try other prompts":
            lambda: explore.respond(changed(desk, max_new_tokens=1), ["x"]),
    }  # fmt: skip
    for line, mistake in mistakes.items():
        with pytest.raises(UserError) as error:
            mistake()
        assert str(error.value) == line
    with pytest.raises(
        UserError, match=r"^prompt 'What is.*'…: \d+ tokens; the limit, rollouts.max_prompt_tokens, is 9$"
    ):
        explore.respond(changed(desk, max_prompt_tokens=9), ["What is it?\nSay."])


def test_prompts_in_several_batches(desk):
    texts = ["What is 2 + 3?", "Solve the problem.", "x"]
    [whole, parts] = [explore.respond(changed(desk, batch=batch), texts) for batch in (3, 2)]
    assert [explore.answer(r) for r in whole] == [explore.answer(r) for r in parts] and len(whole) == 3
    folder = desk.root / "data/models/tiny"
    wanted = prompts.render(models.load_tokenizer(folder), texts[1], None)
    assert whole[1].tokens[whole[1].response == 0].tolist() == wanted


# The notebook


def test_the_notebook_runs_from_top_to_bottom(root, monkeypatch):
    monkeypatch.setattr(params, "load", lambda: SMOKE)
    monkeypatch.setattr(params, "ROOT", root)
    monkeypatch.setattr(stages, "settle", lambda threads, seed: None)
    names, shown = {}, []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, NOTEBOOK.name, "exec"), names)
            if last:
                shown.append(eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names))
    assert [type(one).__name__ for one in shown] == ["HTML"] * 4 + ["DataFrame"]
    assert Page(shown[0]).content(0) == Page(shown[0]).content(1) == Page(shown[2]).content()
    assert list(names["drafters"]) == ["osprey", "eagle3-1l"] and names["adaptation"] in SMOKE.domains
