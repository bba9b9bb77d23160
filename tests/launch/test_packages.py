"""What is published: wheel, sdist, and recipes of conda and Spack that say what setup.cfg says."""

from __future__ import annotations

import configparser
import contextlib
import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import types
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from launch.packages.release import absolute

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "launch" / "packages"
RECIPE = PACKAGES / "conda" / "recipe.yaml"
SPACK = PACKAGES / "spack_repo" / "hvd_adaptive"
URL = "https://example.org/me/hvd_adaptive"
HERE_ONLY = {"torch": "pytorch"}
"""Packages that conda calls otherwise."""


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


def required(setup: configparser.ConfigParser) -> dict[str, str]:
    """Name and version of each requirement."""
    rows = setup["options"]["install_requires"].split()
    return dict(re.fullmatch(r"([\w-]+)(.*)", row).groups() for row in rows)  # type: ignore[union-attr]


# --------------------------------------------------------------------------------- wheel and sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, as `release` leaves it."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    into = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "launch.packages.release", "--url", URL, "--into", into],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if importlib.util.find_spec("twine") is not None:
        assert done.stdout.count("PASSED") == 2, done.stdout[-2000:]
    return into


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_the_package_alone_and_all_of_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "hvd_adaptive"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert names == set(listed.split())


def test_the_sdist_has_what_a_wheel_is_built_from(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "hvd_adaptive/py.typed"} <= names


def test_the_description_leads_to_the_repository_and_shows_its_pictures(metadata: Message) -> None:
    description = str(metadata.get_payload())
    assert f"]({URL}/raw/main/benchmarks/results/training_overview.png)" in description
    text = re.sub(r"^```.*?^```", "", description, flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 20
    assert all(target.startswith(("https://", "#")) for target in targets), targets
    assert f"Source, {URL}" in metadata.get_all("Project-URL", [])


def test_only_what_is_always_used_is_always_installed(metadata: Message) -> None:
    plain = [row for row in metadata.get_all("Requires-Dist", []) if "extra ==" not in row]
    assert sorted(plain) == ["mpi4py", "numba", "numpy", "torch>=2.1"]
    imported = set()
    for path in (ROOT / "hvd_adaptive").rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:import|from) (tqdm|tensorboard)\b", path.read_text(), re.M))
    assert not imported


def test_the_wheel_runs_without_horovod_where_nothing_else_of_the_repository_is(
    wheel: Path, tmp_path: Path
) -> None:
    """Unpacked is installed: it has no script that runs at installation."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import sys\n"
        "sys.modules['horovod'] = None\n"
        "import hvd_adaptive as hva\n"
        f"assert hva.__file__.startswith({str(tmp_path)!r}), hva.__file__\n"
        "hva.Compression.topk(density=0.01)\n"
        "from hvd_adaptive.commands import main\n"
        "assert main(['--version']) == 0\n"
        "import torch\n"
        "try:\n"
        "    hva.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0))\n"
        "except ValueError as error:\n"
        "    assert 'call hvd_adaptive.init() first' in str(error), error\n"
        "else:\n"
        "    sys.exit('it found Horovod')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_only_relative_links_become_absolute() -> None:
    text = "[a](docs/a.md#b) [c](#c) ![d](d.png) [e](https://e.org/f) [m](mailto:m@m)"
    assert absolute(text, "https://h/o", "v1") == (
        "[a](https://h/o/blob/v1/docs/a.md#b) [c](#c) ![d](https://h/o/raw/v1/d.png)"
        " [e](https://e.org/f) [m](mailto:m@m)"
    )


@pytest.mark.parametrize("url", ["example.org/me", "https://example.org", "http://example.org/me/it"])
def test_an_address_that_is_none_is_refused_before_anything_is_built(url: str, tmp_path: Path) -> None:
    from launch.packages import release

    with pytest.raises(SystemExit) as ended:
        release.main(["--url", url, "--into", str(tmp_path / "dist")])
    assert ended.value.code == 2
    assert not (tmp_path / "dist").exists()


# ------------------------------------------------------------------------------------------ conda


def test_the_conda_recipe_says_what_setup_cfg_says(setup: configparser.ConfigParser) -> None:
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load(RECIPE.read_text())
    metadata, options = setup["metadata"], setup["options"]
    assert recipe["context"]["version"] == metadata["version"]
    assert recipe["package"]["name"] == metadata["name"]
    assert recipe["about"]["summary"] == metadata["description"]
    assert recipe["about"]["license"] == metadata["license"]
    scripts = setup["options.entry_points"]["console_scripts"].strip()
    assert recipe["build"]["python"]["entry_points"] == [scripts]
    wanted = {HERE_ONLY.get(name, name): version for name, version in required(setup).items()}
    wanted["python"] = options["python_requires"]
    found = dict(row.partition(" ")[::2] for row in recipe["requirements"]["run"])
    assert found == wanted
    assert recipe["requirements"]["run_constraints"] == [
        setup["options.extras_require"]["horovod"].split()[0].replace("==", " ==")
    ]
    assert (RECIPE.parent / recipe["source"]["path"]).resolve() == ROOT


def test_the_conda_recipe_is_read_and_rendered_by_rattler_build() -> None:
    rattler_build = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed")
    (variant,) = rattler_build.Stage0Recipe.from_file(RECIPE).render()
    assert "hvd_adaptive" in repr(variant)


# ------------------------------------------------------------------------------------------ Spack


class Directives:
    """Stands for ``from spack.package import *``: keeps what a package file declares."""

    def __init__(self) -> None:
        self.said: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(given, options) for each, given, options in self.said if each == name]

    def module(self) -> types.ModuleType:
        module = types.ModuleType("spack.package")
        for name in ("conflicts", "depends_on", "license", "variant", "version"):
            setattr(module, name, self._directive(name))
        return module

    def _directive(self, name: str) -> Any:
        return lambda *given, **options: self.said.append((name, given, options))


@contextlib.contextmanager
def spack(directives: Directives) -> Iterator[None]:
    python = types.ModuleType("spack_repo.builtin.build_systems.python")
    python.PythonPackage = type("PythonPackage", (), {})  # type: ignore[attr-defined]
    made = {"spack.package": directives.module(), python.__name__: python}
    parents = ("spack", "spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems")
    made |= {name: types.ModuleType(name) for name in parents}
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def test_the_spack_package_says_what_setup_cfg_says(setup: configparser.ConfigParser) -> None:
    file = SPACK / "packages" / "py_hvd_adaptive" / "package.py"
    spec = importlib.util.spec_from_file_location("py_hvd_adaptive_for_spack", file)
    assert spec is not None
    assert spec.loader is not None
    directives, module = Directives(), importlib.util.module_from_spec(spec)
    with spack(directives):
        spec.loader.exec_module(module)
    assert module.PyHvdAdaptive.git == ROOT.as_uri()
    assert " ".join(module.PyHvdAdaptive.__doc__.split()) == setup["metadata"]["description"] + "."
    assert [given for given, _ in directives.named("version")] == [(setup["metadata"]["version"],)]
    assert [given for given, _ in directives.named("license")] == [(setup["metadata"]["license"],)]
    always = {given[0] for given, options in directives.named("depends_on") if "when" not in options}
    at_least = {
        f"py-{name}" + version.replace(">=", "@") + (":" if version else "")
        for name, version in required(setup).items()
    }
    python = "python" + setup["options"]["python_requires"].replace(">=", "@") + ":"
    assert always == at_least | {python, "py-setuptools@64:"}
    pinned = setup["options.extras_require"]["horovod"].split()[0].replace("==", "@")
    optional = [given[0] for given, options in directives.named("depends_on") if "when" in options]
    assert any(each.startswith(f"py-{pinned} ") for each in optional), optional
    variants = {given[0] for given, _ in directives.named("variant")}
    used = set(re.findall(r"[+~]([a-z]+)", " ".join(
        options["when"] for _, options in directives.named("depends_on") if "when" in options
    )))  # fmt: skip
    assert used == variants
