"""The installed distribution: its command, missing extras, and a folder with another project."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import batched
from pages import environment
from stage import python

IN_PLACE = Path(batched.__file__).parent


def installed_after(folder: Path) -> None:
    """Leave files of PyPI's `batched`, some of which this project has not."""
    (folder / "batch_processor.py").touch()
    (folder / "inference").mkdir()
    (folder / "inference" / "__init__.py").touch()
    (folder / "__init__.py").write_text("from . import inference")


def removed(folder: Path) -> None:
    """Remove the files that PyPI's `batched` had replaced."""
    (folder / "__init__.py").unlink()
    (folder / "aio" / "__init__.py").unlink()


@pytest.mark.once
@pytest.mark.parametrize(
    ("mix", "command"),
    [
        (installed_after, ("-m", "batched")),
        (removed, ("-c", "from batched.cli import main")),
    ],
)
def test_a_folder_of_two_projects_is_refused_in_one_sentence(
    mix: Callable[[Path], None], command: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "batched"
    shutil.copytree(IN_PLACE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    mix(folder)
    ended = subprocess.run(
        [sys.executable, "-S", *command],  # without other installed packages
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(Path(sys.executable), PYTHONPATH=str(tmp_path)),
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"ImportError: another project, PyPI's `batched`, was installed into {folder} too, so that "
        "files of batched-dynamically are replaced, hidden or missing; run `pip uninstall "
        "batched`, then install batched-dynamically again, with `--force-reinstall`"
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("code", "package", "extra"),
    [
        ("from batched.chat import *; ChatClient('http://a/v1', 'm')", "openai", "chat"),
        ("import batched.asgi", "anyio", "server"),
        ("import batched.beam", "apache_beam", "beam"),
        ("import batched.offline", "pyarrow", "offline"),
        ("from batched.offline import Ray; Ray()", "ray", "ray"),
        ("from batched.metrics import *; prometheus()", "prometheus_client", "prometheus"),
        ("from batched.metrics import *; opentelemetry()", "opentelemetry", "opentelemetry"),
        (
            "from batched.generation import *; TextGenerator.from_pretrained('m')",
            "torch",
            "generation",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(code: str, package: str, extra: str) -> None:
    if extra == "ray":
        pytest.importorskip("pyarrow")
    ended = python(f"import sys; sys.modules[{package!r}] = None; {code}", "-W", "ignore")
    user, _, said = ended.stderr.splitlines()[-1].partition(" needs ")
    assert user.startswith("ModuleNotFoundError: ")
    assert re.split("[. ]", user)[-1] in code
    assert said == (
        f"{package}, which is not installed; run `python -m pip "
        f'install ".[{extra}]"` in a checkout of batched'
    )


@pytest.mark.once
@pytest.mark.model
def test_a_schema_without_its_package_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from batched._generation.schema import Grammars

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match="f: schema needs llguidance, which"):
        Grammars(0, 1, "f").processor("", 0, [1])


def test_the_command_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    [script] = entry_points(group="console_scripts", name="batched")
    assert script.load()([]) == 0
    assert capsys.readouterr().out.startswith("usage: batched [-h]")
