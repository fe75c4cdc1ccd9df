"""`aimaster --help`: what it says, and what it does not load."""

import subprocess
import sys

import pytest

from aimaster.cli.app import VERBS, cli, main

HEAVY = (
    "rich",
    "msgspec",
    "aiohttp",
    "asyncio",
    "psutil",
    "structlog",
    "prometheus_client",
    "torch",
    "numpy",
    "rl_runtime",
    "http.client",
)


def run_main(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_help_imports_nothing_heavy():
    """The help of the whole command is printed without loading any verb or any heavy package."""
    script = (
        "import sys; from aimaster.cli.app import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    loaded = set(shown.stderr.split())
    assert not loaded & set(HEAVY)
    assert {name for name in loaded if name.startswith("aimaster.cli.")} == {"aimaster.cli.app", "aimaster.cli.exits"}
    assert "130  interrupted" in shown.stdout


def test_the_front_imports_neither_torch_nor_the_runtime():
    """The process that runs a job holds no tensor library and nothing of the runtime."""
    script = "import sys, aimaster.cli.front_start; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert not set(shown.stdout.split()) & {"torch", "numpy", "rl_runtime", "agents", "aiohttp", "rich"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_listed_verb_loads_and_explains_itself(verb, capsys):
    """A verb that the help lists is there, and has a help of its own."""
    assert run_main(verb, "--help") == 0
    assert "Usage: aimaster " + verb in capsys.readouterr().out


def test_help_lists_the_verbs_in_the_order_of_a_run(capsys):
    """The verbs stand in the help as they stand in the table."""
    assert run_main("--help") == 0
    out = capsys.readouterr().out
    places = [out.index(f"\n  {verb} ") for verb in VERBS]
    assert places == sorted(places)
    assert cli.list_commands(None) == list(VERBS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["statsu"], "did you mean 'status'"),
        (["status", "--nonsense"], "--nonsense"),
        (["run"], "nothing to run"),
        (["run", "--"], "nothing stands after"),
        (["run", "python", "train.py"], "aimaster run -- python train.py"),
        (["run", "nowhere.toml"], "nowhere.toml: no such file"),
        (["run", "a.toml", "--", "b"], "give one of them"),
        (["run", "--nproc-per-node", "two", "--", "true"], "expected a number"),
        (["run", "--nproc-per-node", "0", "--", "true"], "expected a number"),
        (["run", "--dry-run", "--", "true"], "--dry-run"),
        (["run", "--drill", "kill:rank-9@3", "--", "true"], "there is no 'rank-9'"),
        (["run", "--drill", "shoot:rank-0@3", "--", "true"], "is no drill"),
        (["run", "--", "no-such-program-here"], "no such program"),
        (["run", "--", "python3", "nowhere.py"], "no such script"),
        (["config", "show", "nowhere.toml"], "no such file"),
    ],
)
def test_bad_usage_gets_one_clear_error_and_exit_2(argv, said, capsys, tmp_path, monkeypatch):
    """A wrong command line ends with 2, says what is wrong on stderr, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    assert run_main(*argv) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out
    assert not list(tmp_path.iterdir())
