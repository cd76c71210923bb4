"""Pinned archives: checked, fetched whole or not at all, and read by member; records out of every kind of file."""

import gzip
import hashlib
import http.server
import json
import os
import threading
import zipfile

import pytest
import yaml

from osprey import packages, records
from osprey.params import ROOT, Records, UserError

FILE = "tiny-1.0-py3-none-any.whl"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A pinned wheel that lies in a folder pip can install from; the cache is empty."""
    shop, cache = tmp_path / "shop", tmp_path / "cache"
    shop.mkdir()
    with zipfile.ZipFile(shop / FILE, "w") as wheel:
        wheel.writestr("tiny/b.jsonl", '{"text": "two"}\n\n{"text": "three"}\n')
        wheel.writestr("tiny/a.txt", "one")
        wheel.writestr("tiny/deep/c.json", '[{"text": "four"}]')
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256((shop / FILE).read_bytes()).hexdigest()
    pins = tmp_path / "packages.yaml"
    pins.write_text(yaml.safe_dump({"tiny": {"version": "1.0", "file": FILE, "sha256": digest}}))
    monkeypatch.setattr(packages, "PINS", pins)
    monkeypatch.setenv("OSPREY_PACKAGES", str(cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing leaves the machine
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    return cache / FILE


def test_fetches_once_and_reads(tiny, monkeypatch):
    assert packages.members("tiny", ["tiny/*"]) == ["tiny/a.txt", "tiny/b.jsonl", "tiny/deep/c.json"]
    everything = packages.members("tiny", ["*.json*", "*/deep/*", "*.txt", "*.dist-info/*"])
    assert len(everything) == 6 and everything == sorted(everything)
    assert [item.name for item in tiny.parent.iterdir()] == [FILE]
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # from here on a download would fail
    assert packages.read("tiny", "tiny/a.txt") == b"one"


def test_corrupted_archive(tiny):
    packages.archive("tiny")
    want = hashlib.sha256(tiny.read_bytes()).hexdigest()
    tiny.write_bytes(tiny.read_bytes()[:-1])
    got = hashlib.sha256(tiny.read_bytes()).hexdigest()
    with pytest.raises(UserError) as error:
        packages.archive("tiny")
    message = str(error.value)
    assert all(part in message for part in (str(tiny), got[:12], want[:12], "delete the file"))
    assert "\n" not in message


def test_replaced_release_is_not_kept(tiny):
    pins = yaml.safe_load(packages.PINS.read_text())
    pins["tiny"]["sha256"] = "0" * 64
    packages.PINS.write_text(yaml.safe_dump(pins))
    with pytest.raises(UserError, match="000000000000…: not used"):
        packages.archive("tiny")
    assert list(tiny.parent.iterdir()) == []


def test_failed_download_says_why(tiny, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(UserError, match=r"^cannot fetch tiny==1.0: .*(?i:no matching distribution)") as error:
        packages.archive("tiny")
    assert "\n" not in str(error.value)
    assert list(tiny.parent.iterdir()) == []


@pytest.fixture
def registry(tiny, tmp_path, monkeypatch):
    """A registry on this machine that gives `registry.share` of a wheel, and says it is `registry.promise` of it."""
    wheel = (tmp_path / "shop" / FILE).read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = self.path.endswith(".whl")
            body = wheel if found else f'<a href="/{FILE}">{FILE}</a>'.encode()
            length, sent = (int(len(body) * part) if found else len(body) for part in (server.promise, server.share))
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if found else "text/html")
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body[:sent])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("promise", "reason"), [(1, "not enough bytes|IncompleteRead"), (0.5, "Wheel 'tiny'.*is invalid")]
)
def test_a_download_cut_off_leaves_nothing_and_the_next_one_recovers(tiny, registry, promise, reason):
    registry.promise, registry.share = promise, 0.5
    with pytest.raises(
        UserError, match=f"^cannot fetch tiny==1.0: .*({reason}).*; check the network and run again$"
    ) as cut:
        packages.archive("tiny")
    assert "\n" not in str(cut.value)
    assert list(tiny.parent.iterdir()) == []
    registry.promise = registry.share = 1
    assert packages.archive("tiny") == tiny and packages.read("tiny", "tiny/a.txt") == b"one"


def test_unknown_package_and_members(tiny):
    with pytest.raises(UserError, match="'huge' is not pinned.*tiny"):
        packages.archive("huge")
    with pytest.raises(UserError, match=r"no member matches 'tiny/\*\.csv'"):
        packages.members("tiny", ["tiny/*.txt", "tiny/*.csv"])
    with pytest.raises(UserError, match="no member 'tiny/z'"):
        packages.read("tiny", "tiny/z")


def test_the_pins_are_complete():
    for name, pin in yaml.safe_load((ROOT / "data" / "packages.yaml").read_text()).items():
        assert set(pin) == {"version", "file", "sha256", "licence", "what"}, name
        assert len(pin["sha256"]) == 64 and int(pin["sha256"], 16)
        assert isinstance(pin["version"], str) and pin["file"].startswith(f"{name.replace('-', '_')}-{pin['version']}-")


def read(**spec) -> list[str]:
    return list(records.texts(Records(**spec)))


def test_records_of_a_package(tiny):
    assert read(package="tiny", members=["tiny/*.json*"], field="text") == ["two", "three", "four"]
    assert read(package="tiny", members=["tiny/a.txt"]) == ["one"]
    with pytest.raises(UserError, match=r"tiny: tiny/b.jsonl:1: no field 'body' \(it has text\)"):
        read(package="tiny", members=["tiny/b.jsonl"], field="body")
    with pytest.raises(UserError, match="a.txt: a plain text has no field"):
        read(package="tiny", members=["tiny/a.txt"], field="text")


@pytest.mark.parametrize(
    ("field", "texts"),
    [
        ("input.-1.content", ["how?"]),
        ("input.*.content", ["be kind", "how?"]),
        ("options.*", ["A", "B"]),
        ("options.1", ["B"]),
        ("**", ["be kind", "how?", "A", "B", "q"]),
        ("Asked: {question} {options.0}\n", ["Asked: q A\n"]),
        ("empty", [""]),
        ("half", ["a"]),
    ],
)
def test_fields(tmp_path, field, texts):
    record = {"input": [{"content": "be kind"}, {"content": "how?"}], "options": ["A", "B"], "question": "q"}
    if not field.startswith("*"):
        record |= {"empty": None, "half": "a\ud800", "number": 3}
    path = tmp_path / "one.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    assert read(path=str(path), field=field) == texts


@pytest.mark.parametrize("field", ["input.2.content", "question.x", "question.*", "input.first", "**.content"])
def test_field_that_leads_nowhere(tmp_path, field):
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"input": [{"content": "be kind"}], "question": "q"}))
    with pytest.raises(UserError, match="one.json: no field.*it has input, question"):
        read(path=str(path), field=field)


def test_unreadable_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "cut')
    with pytest.raises(UserError, match=r"a.jsonl:2: not readable"):
        read(path=str(path), field="text")
    path.write_text('"text"\n')
    with pytest.raises(UserError, match="a.jsonl:1: not readable: a record must be"):
        read(path=str(path), field="text")
    path.write_text('{"text": 3}\n')
    with pytest.raises(UserError, match="field 'text' is not text but int"):
        read(path=str(path), field="text")
    with pytest.raises(UserError, match="needs field"):
        read(path=str(path))
    path.write_text('{"text": ["a", "b"]}\n')
    with pytest.raises(UserError, match=r"'text\.\*' in field gives 2 texts"):
        read(path=str(path), field="{text.*}")
    with pytest.raises(UserError, match="b.jsonl: no such file"):
        read(path=str(tmp_path / "b.jsonl"), field="text")
    (tmp_path / "a.csv").write_text("text\n")
    with pytest.raises(UserError, match="unknown suffix"):
        read(path=str(tmp_path / "a.csv"), field="text")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_streams_a_local_dataset_folder(tmp_path, monkeypatch, kind):
    import pandas

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = pandas.DataFrame({"text": [f"row {i}" for i in range(5)], "chat": [[{"value": f"q{i}"}] for i in range(5)]})
    write = {"parquet": rows.to_parquet, "jsonl": lambda path: rows.to_json(path, orient="records", lines=True)}
    write[kind](tmp_path / f"train.{kind}")
    assert read(hub=str(tmp_path), field="text") == list(rows.text)
    assert read(hub=str(tmp_path), field="chat.0.value") == [f"q{i}" for i in range(5)]
    with pytest.raises(UserError, match="no field 'body'"):
        read(hub=str(tmp_path), field="body")
    with pytest.raises(UserError, match=r"\(split test\)"):
        read(hub=str(tmp_path), split="test", field="text")


def test_generated_problems_are_distinct_and_repeatable():
    from itertools import islice

    def first(seed, count):
        return [problem["question"] for problem in islice(records.problems("aiw", seed), count)]

    assert len(set(first(0, 1500))) == 1500
    assert first(0, 1500)[:50] == first(0, 50)
    assert len(set(first(0, 200)) & set(first(1, 200))) < 20
    with pytest.raises(UserError, match="generate: .*no_such"):
        next(records.problems("no_such", 0))


def test_a_generator_that_runs_out_ends(monkeypatch):
    import reasoning_gym

    blocks = iter([["a"] * 20, ["a"] * 20 + ["b"], ["a", "b"] * 15, ["c"], ["d"]])
    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda *_, **__: [{"question": q} for q in next(blocks)])
    monkeypatch.setattr(records, "EXHAUSTED", 30)
    # b comes after 39 repeats, within a block; the 30 repeats of the next block end it before c.
    assert [problem["question"] for problem in records.problems("small", 0)] == ["a", "b"]
    blocks = iter([["a"] * 20, ["b"] * 20, ["c"] * 20, ["c"] * 20, ["d"]])
    assert [problem["question"] for problem in records.problems("small", 0)] == ["a", "b", "c"]
