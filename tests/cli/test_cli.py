"""The command line: bad usage is one line and exit code 2, help explains every flag, and none of it loads torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import click
import pytest

from hora.cli import main
from hora.cli.run import make_config
from hora.launch.config import RunConfig
from hora.runs import exit_codes
from hora_benchmarks.bench.cli import ByteSizes
from launching import SCRIPTS, Launcher

RUN = ["run", "-n", "2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "hora run: no script was given; e.g. hora run -n 4 train.py"),
        (["run", "-n", "0", "hello.py"], "hora run: -n takes a whole number of at least 1, not '0'; e.g. -n 4"),
        (["run", "-n", "two", "hello.py"], "hora run: -n takes a whole number of at least 1, not 'two'"),
        (["run", "-n", "100000", "hello.py"], "hora run: -n takes a number of ranks from 1 to 1024"),
        (["run", "-n"], "option '-n' requires an argument"),
        ([*RUN, "helo.py"], "hora run: there is no script 'helo.py'; did you mean 'hello.py'?"),
        ([*RUN, "zzzzzz.py"], "there are: "),
        ([*RUN, "nowhere/x.py"], "the folder 'nowhere' does not exist"),
        ([*RUN, "-m", "pack.nothing"], "there is no module 'pack.nothing'"),
        ([*RUN, "-m", "pack"], "module 'pack' is a package without __main__"),
        (
            [*RUN, "--strateg", "ring", "hello.py"],
            "hora run: no such option --strateg; did you mean '--strategy'? there are: -n",
        ),
        (
            [*RUN, "--strategy", "rong", "hello.py"],
            "hora run: unknown strategy 'rong'; did you mean 'ring'? there are: auto, diloco, engine",
        ),
        ([*RUN, "--strategy", "ring:x=1", "hello.py"], "strategy 'ring' has no option 'x'"),
        ([*RUN, "--strategy", "ring", "--servers", "2", "hello.py"], "--servers 2: strategy 'ring' uses none"),
        ([*RUN, "--servers", "2", "hello.py"], "--servers 2: no --strategy was given"),
        ([*RUN, "--name", "../up", "hello.py"], "--name '../up' is not a valid name"),
        ([*RUN, "--timeout-s", "0", "hello.py"], "--timeout-s takes a number of seconds above 0, not 0"),
        ([*RUN, "--timeout-s", "nan", "hello.py"], "--timeout-s takes a number of seconds above 0, not nan"),
        ([*RUN, "--color", "red", "hello.py"], "--color: 'red' is not one of 'auto', 'always', 'never'"),
        (
            ["explain", "square"],
            "hora explain: NAME: 'square' is not one of 'ring', 'tree', 'halving', 'star', 'reduce'",
        ),
        (["explain"], "hora explain: NAME is missing"),
        (["explain", "ring", "-n", "0"], "hora explain: -n takes a whole number of at least 1"),
        (
            ["bench", "allreduce", "--sizes", "4K,7Q"],
            "hora bench allreduce: --sizes takes sizes as 4K,64K,1M, not '7Q'",
        ),
        (["bench", "nothing"], "hora bench: no such command 'nothing'; there are: start, allreduce"),
        (["benhc"], "hora: no such command 'benhc'; did you mean 'bench'? there are: run, serve"),
        (["bench", "alreduce"], "hora bench: no such command 'alreduce'; did you mean 'allreduce'? there are: start"),
        (["runn"], "hora: no such command 'runn'; did you mean 'run'? there are: run, serve, explain, bench"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SCRIPTS)
    assert main.main(arguments) == exit_codes.USAGE
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["claims"], "hora: 'claims'"), (["bench", "allreduce", "-n", "2"], "hora bench: 'allreduce'")],
)
def test_commands_of_the_benchmarks_package_say_how_to_install_it(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hora.cli.plugins.command", lambda name: None)
    assert main.main(arguments) == exit_codes.USAGE
    out, err = capfd.readouterr()
    assert out == "" and err == (
        f"{says} needs the package hora-benchmarks, which is not installed; in a checkout of Hora's repository run: "
        "pip install ./benchmarks\n"
    )


def test_what_the_machine_refuses_is_bad_usage_too(launcher: Launcher) -> None:
    for option, value in (("--bind", "192.0.2.1"), ("--log-dir", "/proc/nothing")):
        done = launcher.run("run", option, value, "hello.py")
        assert done.returncode == exit_codes.USAGE and done.stdout == ""
        assert done.stderr.count("\n") == 1 and f"{option} {value}" in done.stderr


def test_help_explains_every_option_with_an_example() -> None:
    pending: list[click.Command] = [main.hora]
    while pending:
        command = pending.pop()
        if isinstance(command, click.Group):
            ctx = click.Context(command)
            pending += [found for name in command.list_commands(ctx) if (found := command.get_command(ctx, name))]
        assert command.help
        for option in command.params:
            if isinstance(option, click.Option):
                assert "e.g. " in (option.help or "").lower(), f"{command.name} {option.name}"


def test_help_of_run_groups_the_options_of_run_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "--help"]) == exit_codes.OK
    said = capsys.readouterr().out
    headings = [line for line in said.splitlines() if line and not line[0].isspace()][1:]
    assert headings == ["Processes:", "Strategy:", "Hosts:", "Serving:", "Output and records:", "Other:"]
    for field in dataclasses.fields(RunConfig):
        if field.name != "command":
            assert (field.metadata["option"].flag or f"--{field.name.replace('_', '-')}") in said


def test_options_that_were_not_given_have_the_defaults_of_run_config() -> None:
    script = str(SCRIPTS / "hello.py")
    assert make_config((script,), {}) == RunConfig(command=(script,))


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "--help"]) == exit_codes.OK
    said = capsys.readouterr().out
    for code in (
        exit_codes.OK,
        exit_codes.SCRIPT_FAILED,
        exit_codes.USAGE,
        exit_codes.RANK_KILLED,
        exit_codes.INTERRUPTED,
        exit_codes.TERMINATED,
    ):
        assert f"{code:>3}  " in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["run", "-n", "0", "x.py"],
        ["run", "nothing.py"],
        ["run", "--join", "nothing", __file__],
        ["show", "nothing"],
    ],
)
def test_help_and_usage_errors_do_not_import_torch(arguments: list[str]) -> None:
    code = f"import sys; from hora.cli.main import main; main({arguments!r}); sys.exit('torch' in sys.modules)"
    src = Path(main.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(src)}, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_sizes_count_in_steps_of_1024() -> None:
    assert ByteSizes().convert("100, 4K,1m,2GB", None, None) == [100, 4096, 1 << 20, 2 << 30]
