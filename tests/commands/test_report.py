"""The page about recorded runs: what stands in it, that it is valid, and that it loads nothing."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hvd_adaptive.commands import report
from hvd_adaptive.commands.report.charts import Scale
from hvd_adaptive.commands.report.figures import Run, decisions
from hvd_adaptive.planning.plan import LayerPlan, Plan
from hvd_adaptive.telemetry import Meter, Placement, Telemetry
from hvd_adaptive.telemetry.recorded import load, read
from tests.telemetry.helpers import Clock

EVIL = "body.<script>alert(1)</script>.weight"
VOID = {"meta"}
"""Elements that are written without an end."""


def plan_of(step: int, version: int, **wire_bytes: int) -> Plan:
    names = {"first": "stem.conv.weight", "second": EVIL}
    rows = [
        LayerPlan(names[name], (8, 8), "topk", nbytes / 256, "allgather", nbytes, 256)
        for name, nbytes in wire_bytes.items()
    ]
    return Plan(tuple(rows), version, step)


def record(folder: Path, compression: str = "topk:density=0.01", exposed: float = 0.06) -> Path:
    """A short run with a planner."""
    clock = Clock()
    telemetry = Telemetry(str(folder), tensorboard=False, every=2, samples_per_step=32)
    with Meter(telemetry, clock=clock, placement=Placement(16, 1, 16, 2)) as meter:
        meter.configuration({"ranks": 16, "compression": compression, "planner": "LGreCo(period=4)"})
        for step in range(13):
            if step in (0, 4, 8):
                meter.scalar("plan/error", 2.0 + step, step)
                meter.scalar("plan/max_error", 2.0 + step, step)
                meter.text("plan/reasons", f"because of step {step} & more", step)
                wire = 128 if step == 0 else 8
                meter.plan(plan_of(step, 1 + step // 4, first=256, second=wire), step)
            clock.now += 0.1
            meter.bucket(0, compress=0.01, exposed=exposed, decompress=0.005, communicate=0.08)
            meter.bucket(0, payload=264, traffic=264, dense=512, energy=2.0, sent=1.0)
            meter.loss(1 / (1 + step))
            meter.end_step(step)
            for kind, value in (("predicted", 264.0), ("measured", 240.0)):
                meter.scalar(f"forecast/{kind}_bytes", value, step)
        meter.scalar("held_out/accuracy", 0.8125, 12)
    return folder


class Page(HTMLParser):
    """Elements that are open, all that were, and the text outside of scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> ends nothing"
        assert self.open.pop() == tag, f"</{tag}> ends another element"

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    runs = [record(folder / "first"), record(folder / "second", "qsgd:bits=4", exposed=0.02)]
    return report.write(runs, folder / "page.html").read_text()


def test_the_page_is_well_formed_and_holds_what_a_run_is_judged_by(source: str) -> None:
    page = Page(source)
    assert page.open == []
    for words in (
        "60 % exposed: 16 ranks on 2 cores, not the network",
        "Where the step's time went",
        "exposed communication 60.00 ms (60.0 %)",
        "compute 25.00 ms (25.0 %)",
        "The plan over time",
        "stem.conv.weight",
        "Forecast against measured",
        "bytes 13 10.0 % 10.0 %",
        "Decisions and reasons",
        "because of step 4 & more",
        "error at 100.0% of what is allowed",
        "3 plans, 1 of which changed nothing",
        "held-out accuracy",
        "81.2 %",
        "Runs compared",
        "Settings that differ",
        "qsgd:bits=4",
    ):
        assert words in page.text, words


def test_the_page_loads_nothing(source: str) -> None:
    assert not re.search(r"https?:|//[a-z0-9]+\.|@import|url\(", source)
    for tag, attributes in Page(source).tags:
        assert tag not in {"link", "img", "iframe", "object", "embed"}, tag
        assert {"src", "href", "srcset", "onclick"}.isdisjoint(attributes), (tag, attributes)


def test_what_a_run_names_cannot_become_a_script(source: str) -> None:
    assert "<script>alert" not in source
    assert EVIL in Page(source).text


def test_charts_carry_their_numbers_as_json(source: str) -> None:
    found = re.findall(r'<script type="application/json">(.*?)</script>', source, re.S)
    assert len(found) > 10
    for data in map(json.loads, found):
        assert data["series"]
        for points in data["series"].values():
            assert all(math.isfinite(at) and math.isfinite(value) for at, value in points)


def test_the_plan_has_a_band_for_every_layer_and_each_time_it_changed(tmp_path: Path) -> None:
    page = Page(report.write([record(tmp_path)]).read_text())
    rects = [attributes for tag, attributes in page.tags if tag == "rect"]
    assert len(rects) == 3  # one layer never changes, the other does once
    assert len({each["fill"] for each in rects}) == 3


def test_a_run_without_a_planner_or_steps_has_a_page_too(tmp_path: Path) -> None:
    with Meter(Telemetry(str(tmp_path), tensorboard=False)) as meter:
        meter.scalar("train/loss", 1.0, 0)
    page = Page(report.write([tmp_path]).read_text())
    assert page.open == []
    assert "No step is recorded yet." in page.text


def test_a_run_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    lines = [
        {"step": step, "time": step, "scalars": {
            "step_time/total": 0.1, "step_time/compute": 0.04, "step_time/compress": 0.01,
            "step_time/communicate": 0.045, "step_time/decompress": 0.005,
        }}
        for step in (10, 20, 30)
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "telemetry.jsonl").write_text(text)
    page = Page(report.write([tmp_path]).read_text())
    assert "exposed communication 45.00 ms (45.0 %)" in page.text


def test_a_resumed_run_counts_each_step_once_and_a_line_that_is_being_written_not_at_all() -> None:
    lines = [
        json.dumps({"step": s, "scalars": {"x": float(n)}}) + "\n" for n, s in enumerate((1, 2, 3, 2))
    ]
    run = read([*lines, '{"step": 4, "scal'])
    assert [(point.step, point.value) for point in run.series("x")] == [(1, 0.0), (2, 3.0)]


def test_means_weigh_records_by_their_steps_and_leave_out_the_first(tmp_path: Path) -> None:
    lines = [
        json.dumps({"step": step, "scalars": {"time/step_ms": value}}) + "\n"
        for step, value in ((10, 900.0), (20, 10.0), (50, 30.0))
    ]
    assert Run("x", read(lines)).mean("time/step_ms") == 25.0


def test_decisions_say_what_changed_and_why(tmp_path: Path) -> None:
    made = decisions(load(record(tmp_path)))
    assert [(each.step, each.changed, each.layers) for each in made] == [
        (0, 2, 2),
        (4, 1, 2),
        (8, 0, 2),
    ]
    assert made[1].reasons == ("because of step 4 & more", "error at 100.0% of what is allowed")
    assert made[1].ratio == 512 / 264


@pytest.mark.parametrize(
    ("low", "high", "logarithmic"),
    [
        (0, 1, False),
        (0, 97, False),
        (-3, 12345, False),
        (126e3, 1.19e6, True),
        (3, 4, True),
        (1, 1e9, True),
    ],
)
def test_a_scale_has_a_few_round_ticks_within_it(low: float, high: float, logarithmic: bool) -> None:
    ticks = Scale(low, high, 0, 100, logarithmic).ticks()
    assert 2 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (None, 2, "nothing recorded: there is no"),
        ("{}\n", 1, "line 1 is no record"),
        ('{"step": 1}\n[]\n', 1, "line 2 is no record"),
        ("", 1, "holds nothing that could be shown yet"),
    ],
)
def test_what_cannot_be_reported_is_said(
    tmp_path: Path, content: str | None, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "telemetry.jsonl").write_text(content)
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.run(parser.parse_args([str(tmp_path)])) == status
    assert message in capsys.readouterr().err


def test_the_module_is_a_command_that_names_the_page(tmp_path: Path) -> None:
    record(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "hvd_adaptive.commands.report", tmp_path],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'report.html'}\n"), done.stderr
    assert (tmp_path / "report.html").exists()


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def test_a_browser_shows_the_page_without_an_error(tmp_path: Path, source: str) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    probe = """<script>
      const figure = document.querySelector("figure.chart"), box = figure.getBoundingClientRect();
      figure.querySelector("svg").dispatchEvent(
        new MouseEvent("mousemove", {clientX: box.left + 200, clientY: box.top + 80}));
      document.body.dataset.tip = figure.querySelector(".tip").innerText;
    </script></body>"""
    page = tmp_path / "page.html"
    page.write_text(source.replace("</body>", probe))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         "--dump-dom", f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    tip = re.search(r'data-tip="([^"]*)"', done.stdout)
    assert tip is not None
    assert re.search(r"first: [\d.]+ \(at \d+", tip[1])
