"""The command line around all commands: help, version, wrong arguments, missing packages."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import batched
from batched import cli
from pages import ROOT
from stage import python


def ended(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    return end.value.code, *capsys.readouterr()


@pytest.mark.once
def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plain = subprocess.run([sys.executable, "-m", "batched"], capture_output=True, text=True)
    assert plain.returncode == 0
    with pytest.raises(SystemExit):
        cli.main(["--help"], prog="python -m batched")
    assert capsys.readouterr().out == plain.stdout


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys, "--version") == (0, f"batched {batched.__version__}\n", "")


BENCH = "bench m:f --input items"


@pytest.mark.once  # the layout of the help depends on the Python
def test_the_page_of_the_command_line_prints_every_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def help_of(*command: str) -> str:
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"], prog="python -m batched")
        return capsys.readouterr().out

    page = (ROOT / "docs/reference/command-line.md").read_text()
    printed = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^    (\w+)  ", help_of(), re.MULTILINE)
    assert printed == [help_of(), *(help_of(command) for command in commands)]
    assert [*commands, "batched.cli"] == re.findall(r"^## (.*)$", page, re.MULTILINE)


def test_a_wrong_argument_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for command, sentence in (
        ("demo --callers 0", "argument --callers: must be at least 1, got 0"),
        ("demo --callers many", "argument --callers: invalid number value: 'many'"),
        ("demo --speed", "unrecognized arguments: --speed"),
        ("run a:b s.csv r.csv --resume", "unrecognized arguments: --resume"),
        (f"{BENCH} --max-batch-size 1", "argument --max-batch-size: must be at least 2, got 1"),
    ):
        status, out, err = ended(capsys, *command.split())
        assert (status, out) == (2, "")
        assert re.fullmatch(rf"batched( demo| bench)?: {sentence}\n", err)


@pytest.mark.once
def test_serve_without_unix_sockets_is_refused_in_one_sentence() -> None:
    code = (
        "import socket, sys; sys.modules['fcntl'] = None; vars(socket).pop('send_fds', None); "
        "from batched.cli import main; sys.exit(main(['serve', 'm:f', '--socket', 's']))"
    )
    refused = python(code, "-W", "ignore")
    assert refused.returncode == 2
    assert refused.stderr == (
        "batched serve: OSError: batched serve needs Unix sockets, which Linux and macOS have, and "
        "Windows has not\n"
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("command", "extra", "package"),
    [
        ("demo", "demo", "numpy"),
        (BENCH, "bench", "rich"),
        ("run m:f in.csv out.csv", "offline", "pyarrow"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(command: str, extra: str, package: str) -> None:
    pytest.importorskip(package)
    code = (
        f"import sys; sys.modules[{package!r}] = None; from batched.cli import main; "
        f"sys.exit(main({command.split()}))"
    )
    missing = python(code, "-W", "ignore")
    assert missing.returncode == 2
    assert missing.stderr == (
        f"batched {command.partition(' ')[0]}: this command needs {package}, which is not "
        f'installed; run `python -m pip install ".[{extra}]"` in a checkout of batched\n'
    )
