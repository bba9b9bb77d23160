"""The command ``hva``: its list, its help, and what it says to a wrong command line."""

from __future__ import annotations

import configparser
import subprocess
import sys

import pytest

from hvd_adaptive.commands import COMMANDS, main, run_command
from tests.commands.launching import hva
from tests.harness.rank_launcher import ROOT


def test_the_script_hva_is_this_command() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    entry = setup["options.entry_points"]["console_scripts"].strip()
    assert entry == f"hva = {main.__module__}:{main.__name__}"


def test_every_command_is_listed_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed and summary in listed for name, summary in COMMANDS.items())
    assert main([]) == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(name, ["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: hva {name}" in shown
    assert "example" in shown
    assert f"hva {name}" in shown.partition("example")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_heading_in_its_page(name: str) -> None:
    assert f"\n## `hva {name}`\n" in (ROOT / "docs" / "commands.md").read_text()


def test_an_unknown_command_is_refused_with_the_known_ones() -> None:
    done = hva("docter")
    assert done.returncode == 2
    assert "there is no command 'docter': write one of run, predict, doctor," in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--compresion", "topk", "--", "x.py"], "arguments: --compresion; 'hva run --help' sh"),
        (["doctor", "--slow-link", "fast"], "'fast'; 'hva doctor --help' shows all options and an ex"),
        (["trace", "out.json", "nothing.json"], "there is no nothing.json: write 'hva trace OUT FILE"),
        (["report", "nothing"], "there is no nothing/telemetry.jsonl; write the folder of a run"),
        (["install-horovod", "--sdist", "nothing"], "no file nothing; write the path of horovod-0"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2_and_what_to_write(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run_command(words[0], words[1:])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    assert said in capsys.readouterr().err


def test_starting_the_command_does_not_import_torch() -> None:
    """In each of 16 ranks that would take seconds, before the script imports it again."""
    program = (
        "import sys\nfrom hvd_adaptive.commands import main\nmain(['--version'])\n"
        "from hvd_adaptive.commands import predict, run\nassert run.run and predict.run\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "hvd_adaptive 0.1.0\n")
