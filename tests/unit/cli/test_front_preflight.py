"""What is said before anything starts."""

import socket

import pytest

from aimaster.cli.app import main
from aimaster.cli.front_preflight import check_command, check_port


def test_a_port_in_use_is_named_and_a_free_one_passes():
    """The wished port is tried; 0 always fits."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1" in check_port("127.0.0.1", port)[0]
    assert check_port("127.0.0.1", port) == []
    assert check_port("127.0.0.1", 0) == []


def test_a_command_needs_its_program_and_its_script(tmp_path):
    """A program that is not there and a script that is not there are said at once; what is passed to them is not looked at."""
    assert check_command(["true", "--whatever", "nowhere.py"], tmp_path, 0) == []
    assert check_command(["python3", "-c", "pass"], tmp_path, 0) == []
    assert check_command(["python3", "a.py"], tmp_path, 0) == [f"no such script: a.py (looked in {tmp_path})"]
    assert "no such program" in check_command(["no-such-program-here"], tmp_path, 0)[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[rollout]\nn_generatoin = 4\n", "n_generation"),
        ("[policy]\nmodel_name_or_path = 'empty'\n", "holds no config.json"),
        (
            "[rollout]\nn_generation = 4\n[aimaster]\ntask = 'sort6'\ndrill = 'kill:nobody@1'\n[aimaster.model]\n",
            "there is no 'nobody'",
        ),
        ("", "policy.model_name_or_path"),
        ("[aimaster]\n", "policy.model_name_or_path"),
        ("[policy]\nmodel_name_or_path = 'garbage'\n", "config.json is no JSON"),
        ("train = 3\n", "train"),
        ("[train\n", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys, text, said):
    """Each of these ends with 2, one clear error, and no run folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "garbage" / name).write_bytes(b"\x00 garbage")
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["run", "job.toml"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
