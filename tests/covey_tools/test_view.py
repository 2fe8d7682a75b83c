"""`covey view`: what its server answers, to whom, and the page as one file; `benchmarks/view.py` drives a browser."""

import asyncio
import base64
import gzip
import json
import re
import time
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from PIL import Image

from covey.core.batch import collate
from covey.core.findings import Finding
from covey.core.media import Media
from covey.core.records import FinishReason, PromptSample, Rollout, RolloutBatch
from covey.observability.findings import write_findings
from covey.observability.page.export import digest
from covey.observability.page.runs import RecordedRun, title_of
from covey.observability.record import Recorder
from covey.observability.record_files import FINDINGS, FOLDER, files, read_rows, spent
from covey.observability.updates import vocabulary_of
from covey.trainer.evaluation.suites import EvalSuite
from covey_tools.view import command, server
from tests.support import records, runs, tiny
from tests.support.engines import CopyEngine


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of 3 steps of 8 rollouts, with its largest gap."""
    folder = tmp_path_factory.mktemp("view") / "run"
    return folder, records.write(folder, steps=3, prompts=2, size=4, length=40, tools=True)


def answers(folders, *asked):
    """Status, headers and body of requests: paths, or pairs of a path and headers."""

    async def ask():
        runner = web.AppRunner(server.application([RecordedRun(folder) for folder in folders]))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        found = []
        async with aiohttp.ClientSession() as session:
            for path, headers in ((one, {}) if isinstance(one, str) else one for one in asked):
                async with session.get(base + path, headers=headers) as response:
                    found.append((response.status, response.headers, await response.text()))
        await runner.cleanup()
        return found

    return asyncio.run(ask())


def tokens_of(rollout, name):
    column = next(one for one in rollout["tokens"]["columns"] if one["name"] == name)
    return np.frombuffer(base64.b64decode(column["values"]), "<f4")


def test_summaries_name_the_largest_gap(recorded):
    folder, planted = recorded
    run = RecordedRun(folder)
    keys = [key for key, _ in run.state()["blocks"]]
    blocks = run.blocks(keys)
    size, name, token = planted["gap"]
    found = max(
        (abs(gap), f"{key}.{row}", block["columns"]["gap_at"][row])
        for key, block in blocks.items()
        for row, gap in enumerate(block["columns"]["gap"])
    )
    assert found[0] == pytest.approx(size, rel=1e-4) and found[1:] == (name, token)
    assert abs(tokens_of(run.rollout(name), "gap")[token]) == pytest.approx(size, rel=1e-4)


def test_a_rollout_has_its_tokens_and_messages(recorded):
    folder, _ = recorded
    rollout = RecordedRun(folder).rollout("2.0.0")
    ids = np.frombuffer(base64.b64decode(rollout["tokens"]["ids"]), "<i4")
    text = "".join(rollout["tokens"]["pieces"][number] for number in ids.tolist())
    assert text == tiny.tokenizer().decode(ids)
    assert {len(tokens_of(rollout, one["name"])) for one in rollout["tokens"]["columns"]} == {len(ids)}
    assert rollout["rewards"].keys() == {"right", "brief"} and rollout["data"] == {"answer": "2"}


@pytest.mark.slow
def test_values_of_updates_come_with_their_tokens(tmp_path):
    """The second pass over a rollout batch changes ratios, and is clipped where they leave the range."""
    settings = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1, "beta": 0.05}
    runs.trainer(tmp_path, record="tokens", **settings).train()
    run = RecordedRun(tmp_path)
    clipped = trained = 0
    for row in range(8):
        rollout = run.rollout(f"0.0.{row}")
        old, current, ratio, cut, advantage = (
            tokens_of(rollout, name) for name in ("trainer", "current", "ratio", "clipped", "advantages")
        )
        assert ratio == pytest.approx(np.exp(current - old), rel=1e-4)
        outside = ((ratio < 0.8) & (advantage < 0)) | ((ratio > 1.2) & (advantage > 0))
        assert (cut == 0.5 * outside).all()  # of two updates, the first has ratios of 1
        clipped, trained = clipped + outside.sum(), trained + (~outside).sum()
    assert clipped and trained


def test_metrics_are_those_of_the_run(tmp_path):
    trained = runs.trainer(tmp_path, record="tokens", max_steps=2)
    trained.train()
    run = RecordedRun(tmp_path)
    lines = run.described()["metrics"]
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(runs.history(trained, "loss"))
    assert lines[0]["cpu_seconds"] > 0 and lines[0]["memory_gb"] > 0 and run.state()["live"] == "ended"


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_metrics(tmp_path):
    """A line that a kill cut off is gone, and steps that are taken again replace theirs."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    runs.trainer(tmp_path, max_steps=2, **saving).train()
    with (tmp_path / FOLDER / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    runs.trainer(tmp_path, max_steps=3, **saving).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    lines = [line for line in RecordedRun(tmp_path).described()["metrics"] if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_findings_of_the_doctor_are_shown(tmp_path):
    records.write(tmp_path, steps=1, prompts=1, size=2, length=8)
    run = RecordedRun(tmp_path)
    before = run.state()["version"]
    write_findings(tmp_path / FOLDER / FINDINGS, [Finding("kl-scale", "error", "it is 3", "set beta to 0")])
    assert run.described()["findings"][0]["title"].startswith("the KL penalty") and run.state()["version"] != before


def test_warnings_of_the_run_are_findings(tmp_path):
    """Every completion gets the same reward; a finding of the doctor's takes the place of the run's of its code."""

    def constant(completions, **kwargs):
        return [0.5] * len(completions)

    with pytest.warns(UserWarning, match="nothing is learnt"):
        runs.trainer(tmp_path, parts={"reward_funcs": constant}, max_steps=2).train()
    (found,) = RecordedRun(tmp_path).described()["findings"]
    assert found["code"] == "signal-sparse" and found["evidence"] and found["fix"]
    write_findings(tmp_path / FOLDER / FINDINGS, [Finding("signal-sparse", "error", "none", "another reward")])
    assert [one["level"] for one in RecordedRun(tmp_path).described()["findings"]] == ["error"]


@pytest.mark.slow
def test_evaluations_are_curves_with_their_intervals(tmp_path):
    suite = EvalSuite(tiny.rows()[:4], num_generations=2, pass_at=(1,), success_threshold=6.5)
    held = {"plain": tiny.rows()[:4], "held": suite}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    trained = runs.trainer(tmp_path, parts={"eval_dataset": held}, **settings)
    trained.train()
    curves = {(one["set"], one["metric"]): one["points"] for one in RecordedRun(tmp_path).described()["evaluations"]}
    assert {name for name, metric in curves if metric == "reward"} == {"plain", "held"}
    assert [point["x"] for point in curves["plain", "reward"]] == [1, 2]
    assert [point["y"] for point in curves["held", "pass@1"]] == runs.history(trained, "eval_held_pass@1")
    assert all(one["low"] <= one["y"] <= one["high"] for one in curves["held", "pass@1"])


@pytest.mark.slow
def test_completions_of_evaluations_are_pairs_with_their_images(tmp_path):
    parts = {"eval_dataset": tiny.rows(2)}
    runs.trainer(tmp_path, parts=parts, eval_strategy="steps", eval_steps=1, eval_on_start=True, max_steps=1).train()
    found = RecordedRun(tmp_path).pairs()
    assert [pair["prompt"] for pair in found] == [row["prompt"] for row in tiny.rows(2)]
    assert {(pair["before"]["step"], pair["after"]["step"]) for pair in found} == {(0, 1)}
    assert all(isinstance(pair["after"]["reward"], float) for pair in found)


def test_the_timeline_of_the_latest_rollout_batch_is_shown(tmp_path):
    runs.trainer(tmp_path, max_steps=1).train()
    timeline = RecordedRun(tmp_path).described()["timeline"]
    assert timeline["seconds"] > 0 and {"generate"} <= {name for name, _, _ in timeline["phases"]}
    assert len(timeline["rollouts"]) == timeline["parts"] and max(timeline["rollouts"]) > 0


SYSTEM = {"role": "system", "content": "Name the department that should answer."}


def asked(text, system=SYSTEM):
    return [system, {"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("prompts", "titles"),
    [
        ([asked("my card"), asked("my app")], ["my card", "my app"]),
        (["Count the letters of this word: tree", "Count the letters of this word: two"], ["… tree", "… two"]),
        ([asked("the same", {"role": "system", "content": f"You are a helpful {who}."}) for who in "ab"], None),
        ([asked("one alone")], ["one alone"]),
        (["1 + 1", "1 + 2"], ["1 + 1", "1 + 2"]),  # too little to leave out
    ],
)
def test_prompts_are_named_by_what_differs(prompts, titles):
    title = title_of(prompts)
    assert [title(prompt) for prompt in prompts] == (titles or ["… a.\nuser: the same", "… b.\nuser: the same"])
    assert title("Another text") == "Another text"  # which does not begin as they do


def test_time_and_cores_are_those_of_all_processes_without_pauses():
    """Two processes: of the first 40 of 50 s of CPU are after its first log, all 30 of the second count."""

    def line(time, cpu, run):
        return {"time": time, "cpu_seconds": cpu, "run_seconds": run}

    first, second = [line(100, 10, 5), line(160, 50, 65)], [line(9000, 20, 15), line(9010, 30, 25)]
    assert spent([*first, *second]) == (60 + 15 + 10, 40 + 20 + 10)
    without = [{key: value for key, value in one.items() if key != "run_seconds"} for one in [*first, *second]]
    assert spent(without) == (60 + 10, 40 + 20 + 10)  # of an earlier release: the time before a first log is unknown
    assert np.isnan(spent(first[:1])[0])


def test_a_run_killed_after_its_first_log_has_not_spent_the_pause():
    """The second training's first log comes later than the first one's, so that every counter has grown: 5 and 7 s."""

    def line(time, cpu, run, began):
        return {"time": time, "cpu_seconds": cpu, "run_seconds": run, "began": began}

    lines = [line(105, 4, 5, 100.0), line(5012, 6, 12, 5000.0), line(5017, 9, 17, 5000.0)]
    assert spent(lines) == (12 + 5, 6 + 3)
    assert spent(lines[1:]) == (5, 3)


def test_a_training_that_the_machine_slept_through_is_one():
    """The clock has moved by an hour, and the training by ten seconds."""
    lines = [
        {"time": 105 + hour, "cpu_seconds": 4 + run, "run_seconds": run, "began": 100.0}
        for hour, run in ((0, 5), (3600, 15))
    ]
    assert spent(lines) == (10, 10)


@pytest.mark.slow
def test_lines_of_a_resumed_run_tell_when_theirs_began(tmp_path):
    runs.trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    runs.trainer(tmp_path, max_steps=3).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    lines = RecordedRun(tmp_path).described()["metrics"]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2, 3]
    assert (
        len({line["began"] for line in lines if line["step"] < 3}) == 1 and len({line["began"] for line in lines}) == 2
    )


@pytest.mark.slow
def test_a_run_resumed_in_its_own_process_has_not_spent_what_came_before(tmp_path):
    """As in a notebook, whose imports and other cells are no cost of the run."""
    before = time.process_time()
    runs.trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    runs.trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    _, cores = spent(RecordedRun(tmp_path).described()["metrics"])
    assert 0 < cores <= time.process_time() - before


def test_a_replay_calls_no_change_of_the_policy_a_gap(tmp_path):
    records.write(tmp_path, steps=1, prompts=1, size=2, length=8)
    gap = next(one for one in RecordedRun(tmp_path).rollout("0.0.0")["tokens"]["columns"] if one["name"] == "gap")
    path = tmp_path / FOLDER / "run.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "settings": {**described.get("settings", {}), "replay_from": "'other'"}}))
    of_replay = RecordedRun(tmp_path).rollout("0.0.0")["tokens"]["columns"]
    assert next(one for one in of_replay if one["name"] == "gap")["title"] != gap["title"]


def test_a_default_run_can_be_looked_at(tmp_path):
    """Rollouts are on record, their tokens are not."""
    runs.trainer(tmp_path, max_steps=2).train()
    run = RecordedRun(tmp_path)
    block = run.blocks(["1.0"])["1.0"]
    assert block["columns"]["step"] == [2] * 8 and all(block["columns"]["length"])
    assert run.rollout("1.0.7")["tokens"] is None and run.rollout("1.0.7")["completion"]


def test_a_run_is_followed_while_it_is_written(tmp_path):
    records.write(tmp_path, steps=2, prompts=1, size=2, length=8)
    run = RecordedRun(tmp_path)
    before = dict(run.state()["blocks"])
    update = next((tmp_path / FOLDER).glob("update_00002.parquet"))
    kept = update.read_bytes()
    update.unlink()
    run = RecordedRun(tmp_path)
    half = run.blocks(["1.0"])["1.0"]["columns"]["clipped"]
    update.write_bytes(kept)
    assert dict(run.state()["blocks"]) == before
    assert half == [None, None] and None not in run.blocks(["1.0"])["1.0"]["columns"]["clipped"]


def test_search_finds_prompts_and_completions(recorded):
    folder, _ = recorded
    run = RecordedRun(folder)
    assert len(run.search("what IS 2 + 0")) == 4
    assert len(run.search("THE answer is")) == 24 and not run.search("no such words")


def test_images_are_shown_by_name(tmp_path):
    picture = Image.new("RGB", (600, 300), "red")
    media = (Media((picture,), {}, {}, start=0, length=1, short_ids=(4,)),)
    made = [Rollout([4], [5], [True], [-1.0], "red", FinishReason.STOP, media=media) for _ in range(2)]
    draws = [PromptSample({"prompt": "?"}, 0, sample) for sample in range(2)]
    scored = RolloutBatch(draws, made, torch.zeros(2, 1), {}, [{}, {}])
    batch = collate(made)
    batch.advantages = batch.weights = torch.zeros(2)
    recorder = Recorder(tmp_path / FOLDER, ["one"], lambda: {"settings": {}}, tokenizer=tiny.tokenizer())
    recorder.add(1, 0, scored, batch)
    recorder.on_step_end(None, records.state(1), None)
    run = RecordedRun(tmp_path)
    names = [run.rollout(f"0.0.{row}")["image_files"] for row in range(2)]
    assert names[0] == names[1] and len(names[0]) == 1
    assert max(Image.open(run.image(names[0][0])).size) == 256
    with pytest.raises(LookupError):
        run.image("../run.json")


HOSTS = {
    "127.0.0.1": 200,
    "localhost:80": 200,
    "evil.example": 403,
    "127.0.0.1.evil.example:80": 403,
    "evil.example:127": 403,
}


@pytest.mark.parametrize("host", HOSTS)
def test_only_this_machine_is_answered(host, recorded):
    (status, headers, body), *_ = answers([recorded[0]], ("/api/state", {"Host": host}))
    assert status == HOSTS[host] and ("blocks" in body) == (status == 200)
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_pages_of_other_origins_get_nothing(recorded):
    evil = {"Origin": "http://evil.example"}
    assert [status for status, _, _ in answers([recorded[0]], ("/", evil), ("/api/state", evil))] == [403, 403]


MISSING = ("/api/run/1", "/api/run/x", *(f"/api/rollout/0/{name}" for name in ("9.0.0", "0.0.99", "x", "0.0.-1")))


def test_what_is_not_there_is_not_found(recorded):
    paths = (*MISSING, "/api/image/0/..%2Frun.json", "/core.js", "/../../etc/passwd", "/api/blocks/0?keys=7.7")
    statuses = [status for status, _, _ in answers([recorded[0]], *paths)]
    assert statuses == [404] * (len(paths) - 1) + [200]


def test_the_page_asks_for_nothing_elsewhere(recorded):
    page, style, code = (body for _, _, body in answers([recorded[0]], "/", "/style.css", "/page.js"))
    assert "<script" not in page.replace('<script type="module" src="page.js"></script>', "")
    for text in (page, style, code):
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) and "innerHTML" not in text
    assert not re.search(r"^(import|export) ", code, re.MULTILINE)


def test_an_export_is_one_file_with_its_data(recorded, tmp_path):
    folder, _ = recorded
    assert command.main([str(folder), "--export", str(tmp_path / "run.html"), "--steps", "2:3"]) == 0
    page = (tmp_path / "run.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    blocks = {f"blocks/0/{number}.0" for number in range(3)}
    assert data.keys() == {"state", "run/0", "pairs/0", *blocks, "rollouts/0/1.0", "rollouts/0/2.0"}
    rollouts = json.loads(gzip.decompress(base64.b64decode(data["rollouts/0/2.0"])))
    assert rollouts == json.loads(json.dumps(RecordedRun(folder).rollout_batch("2.0")))
    code = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)[1]
    assert digest(code) in page and "src=" not in page.split("</head>")[0]


def test_an_export_says_what_did_not_fit(recorded, tmp_path, capsys):
    command.main([str(recorded[0]), "--export", str(tmp_path / "small.html"), "--max_mb", "0.02"])
    assert "without the texts of 3 rollout batches" in capsys.readouterr().out


def test_a_folder_without_a_record_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has no record"):
        command.main([str(tmp_path)])


WORDS = {"Ġa": b" a", "é": None, "Ã©": "é".encode(), "<|end|>": b"<|end|>", "ĊĊ": b"\n\n"}


def test_byte_level_tokens_have_their_bytes():
    class Backend:
        decoder = "ByteLevel(add_prefix_space=True)"

    class Tokenizer:
        backend_tokenizer = Backend()

        def __len__(self):
            return len(WORDS)

        def convert_ids_to_tokens(self, ids):
            return [list(WORDS)[number] for number in ids]

    found = dict(zip(WORDS, vocabulary_of(Tokenizer()), strict=True))
    assert {word: data for word, data in found.items() if WORDS[word]} == {w: d for w, d in WORDS.items() if d}
    assert found["é"] == b"\xe9"  # one byte of Latin-1, as byte-level tokenizers write it


class WithoutEntropies(CopyEngine):
    async def generate(self, request):
        return [replace(completion, entropies=None) for completion in await super().generate(request)]


def test_entropies_of_updates_stand_in_for_the_engines(tmp_path):
    runs.trainer(tmp_path, record="tokens", max_steps=1, parts={"engine": WithoutEntropies(tiny.model())}).train()
    run = RecordedRun(tmp_path)
    assert read_rows(files(tmp_path / FOLDER)[0])[0]["entropies"] is None
    entropies = tokens_of(run.rollout("0.0.0"), "entropies")
    assert len(entropies) and (entropies > 0).all()
