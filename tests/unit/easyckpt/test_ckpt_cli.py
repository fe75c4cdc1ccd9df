"""The `easyckpt` command, and the formats it moves to and from."""

import json
import os
import pickle
import pty
import re
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from easyckpt import Checkpointer
from easyckpt.adapters import interchange
from easyckpt.cli import cli
from easyckpt.errors import Foreign
from easyckpt.target import look


def run(*argv, code=0):
    done = CliRunner().invoke(cli, [str(part) for part in argv], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def state(value=1.0):
    tied = torch.full((4, 3), value)
    return {
        "model": {"a.weight": tied, "b.weight": tied, "c.bias": torch.arange(5, dtype=torch.bfloat16) * value},
        "optimizer": {"state": {0: {"step": torch.tensor(value), "m": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "step": 3,
    }  # fmt: skip


@pytest.fixture
def storage(tmp_path, folder):
    """Steps 1 to 3 on storage, 2 and 3 in memory."""
    engine = Checkpointer(tmp_path / "ckpts", folder=folder)
    for step in (1, 2, 3):
        engine.save(step, state(float(step)))
        engine.wait()
    engine._flusher.sidecar._process.kill()
    engine._flusher.sidecar._process.wait()
    yield tmp_path / "ckpts"
    engine.close()


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['easyckpt', '--help']\nimport easyckpt.cli\n"
        "try: easyckpt.cli.main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Exit codes" in done.stdout


def test_ls_lists_a_storage_and_a_segment_folder(storage, folder):
    rows = json.loads(run("ls", storage, "--json").stdout)
    assert [(row["step"], row["tier"]) for row in rows] == [(3, "storage"), (2, "storage"), (1, "storage")]
    assert [row["step"] for row in json.loads(run("ls", folder, "--json").stdout)] == [3, 2]
    assert "lineage" in run("ls", storage).stdout
    assert "is not there" in run("ls", storage / "absent", code=2).stderr


def test_show_tells_of_every_tensor(storage):
    text = run("show", storage, "--step", 2).stdout
    assert "model/a.weight" in text
    assert "= model/a.weight" in text
    (header,) = json.loads(run("show", storage / "trainer" / "l000-s000000002-e000", "--json").stdout)
    assert header["step"] == 2
    assert "no snapshot of step 9" in run("show", storage, "--step", 9, code=2).stderr


def test_verify_finds_damage_in_shards_and_manifests(storage, folder):
    assert run("verify", storage).stdout.count(" ok") == 3
    assert json.loads(run("verify", folder, "--json").stdout)[0]["state"] == "ok"
    shard = next(storage.glob("trainer/*3-e000/*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(bytes(raw))
    manifest = next(storage.glob("trainer/*2-e000/manifest.json"))
    manifest.write_text(manifest.read_text().replace("trainer-0", "trainer-1"))
    text = run("verify", storage, code=1).stdout
    assert text.count("BAD") == 2
    assert text.count(" ok") == 1
    run("verify", storage, "--step", 1)


def test_diff_names_what_differs_and_by_how_much(storage, folder):
    run("diff", storage, folder)
    rows = json.loads(run("diff", storage, storage, "--step-b", 1, "--json", code=1).stdout)
    by_name = {row["tensor"]: row["difference"] for row in rows}
    assert by_name == {
        "model.a.weight": 2.0, "model.b.weight": 2.0, "model.c.bias": 8.0, "optimizer.state.0.step": 2.0,
    }  # fmt: skip
    run("diff", storage, storage, "--step-b", 1, "--tolerance", 8)


def test_diff_reads_only_what_the_digests_do_not_prove_equal(storage, folder, monkeypatch):
    """Of two steps the unchanged tensors are not read; a snapshot beside itself is not read at all."""
    read = []
    build = interchange.fitting.build

    def watched(shards, *, only, advance):
        read.append(only)
        return build(shards, only=only, advance=advance)

    monkeypatch.setattr(interchange.fitting, "build", watched)
    run("diff", storage, folder)
    assert read == []
    run("diff", storage, folder, "--step-a", 2, "--step-b", 3, code=1)
    assert read == [["model/a.weight", "model/b.weight", "model/c.bias", "optimizer/state/0/step"]] * 2


def test_gc_keeps_the_newest(storage, folder):
    assert run("gc", storage, "--keep", 1).stdout.split() == [
        "trainer/l000-s000000001-e000",
        "trainer/l000-s000000002-e000",
    ]
    assert [one.step for one in look(storage).candidates] == [3]
    assert run("gc", folder, "--sealed").stdout == ""  # their writer lives


def same(a, b):
    flat_a, flat_b = dict(interchange.tensors_of(a)), dict(interchange.tensors_of(b))
    return set(flat_a) == set(flat_b) and all(torch.equal(flat_a[name], flat_b[name]) for name in flat_a)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_folder_goes_out_and_comes_back(storage, tmp_path):
    """Read by torch's own loader, and imported again as a checkpoint with the same tensors and values."""
    run("export", storage, tmp_path / "dcp", "--format", "dcp")
    import torch.distributed.checkpoint as dcp

    target = state(0.0)
    target["model"] = {name: torch.zeros_like(tensor) for name, tensor in target["model"].items()}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(target, state(3.0))
    run("import", tmp_path / "dcp", tmp_path / "back", "--format", "dcp", "--step", 7)
    found = look(tmp_path / "back")
    back = interchange.load_whole(found, found.one(7))
    assert same(back, state(3.0))
    assert back["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert back["step"] == 3


class Evil:
    def __reduce__(self):
        return (print, ("this must never be printed",))


def test_a_malicious_dcp_folder_is_refused_and_not_run(tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(Foreign, match=r"builtins\.print"):
        interchange.import_dcp(tmp_path)
    assert capsys.readouterr().out == ""
    assert "refused" in run("import", tmp_path, tmp_path / "s", "--format", "dcp", code=1).stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_object_that_is_code_is_refused(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2), "evil": Evil()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(Foreign, match="Weights only"):
        interchange.import_dcp(tmp_path)


def test_transformers_loads_the_export(tmp_path, folder):
    """A small Llama with tied embeddings: exported, loaded by from_pretrained, the same logits; and imported again."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=True
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    config.save_pretrained(tmp_path / "config")
    engine = Checkpointer(folder=folder)
    engine.save(5, {"model": model})
    engine.wait()
    run("export", folder, tmp_path / "hf", "--format", "hf", "--config-from", tmp_path / "config")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    run("import", tmp_path / "hf", tmp_path / "back", "--format", "hf")
    assert "is there already" in run("export", folder, tmp_path / "hf", "--format", "hf", code=2).stderr
    engine.close()


def test_large_exports_are_split_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(interchange, "SHARD_BYTES", 100)
    tensors = {f"w{i}": torch.full((10,), float(i)) for i in range(5)}
    files = interchange.export_huggingface(tensors, tmp_path / "hf")
    assert len(files) == 3
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert same(interchange.import_huggingface(tmp_path / "hf"), {"model": tensors})


def test_a_plain_file_is_loaded_by_torch(storage, tmp_path):
    run("export", storage, tmp_path / "all.pt", "--format", "torch", "--step", 1)
    assert same(torch.load(tmp_path / "all.pt", weights_only=True), state(1.0))
    run("export", storage, tmp_path / "model.pt", "--format", "torch", "--prefix", "model")
    assert set(torch.load(tmp_path / "model.pt", weights_only=True)) == {"a.weight", "b.weight", "c.bias"}
    assert (
        "no 'nothing'"
        in run("export", storage, tmp_path / "x", "--format", "torch", "--prefix", "nothing", code=1).stderr
    )


def shown_on_a_terminal(*argv):
    """What a command shows where stderr is a terminal."""
    screen, terminal = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(interchange.__file__).parents[2]),
        "TERM": "xterm",
        "COLUMNS": "100",
    }
    code = "from easyckpt.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, argv)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=terminal) as process:
        os.close(terminal)
        seen = b""
        while block := _read(screen):
            seen += block
        os.close(screen)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())


def _read(screen):
    try:
        return os.read(screen, 65536)
    except OSError:  # the other end is closed
        return b""


def test_progress_is_shown_on_a_terminal_and_nowhere_else(storage, tmp_path):
    """Verifying and exporting: a bar that ends full; piped away, not a word of it."""
    for argv, word in (
        (("verify", storage), "verifying"),
        (("export", storage, tmp_path / "m.pt", "--format", "torch", "--prefix", "model"), "reading"),
    ):
        code, seen = shown_on_a_terminal(*argv)
        assert code == 0, seen
        assert word in seen
        full = seen.rsplit(word, 1)[1].split("\n")[0]
        done, total = full.split("/")[0].split()[-1], full.split("/")[1].split()[0]
        assert done == total
    assert "verifying" not in run("verify", storage).output


def test_a_storage_behind_a_url_is_a_target_as_well(storage):
    """ls, verify, diff and gc on an object store; import into one."""
    url = f"memory://{uuid.uuid4().hex}"
    fs, root = fsspec.core.url_to_fs(url)
    fs.put(f"{storage}/", root, recursive=True)
    assert [row["step"] for row in json.loads(run("ls", url, "--json").stdout)] == [3, 2, 1]
    assert run("verify", url).stdout.count(" ok") == 3
    run("diff", url, storage)
    run("gc", url, "--keep", 1)
    assert [one.step for one in look(url).candidates] == [3]
    fs.store.clear()


@pytest.mark.parametrize("tolerance", ["nan", "-1", "-inf"])
def test_a_tolerance_that_is_none_is_a_usage_error(storage, tolerance):
    """Not a number compares with nothing: everything would look alike."""
    assert "from 0 on" in run("diff", storage, storage, "--tolerance", tolerance, code=2).stderr


def test_an_import_of_a_step_below_zero_is_a_usage_error(tmp_path):
    """Nothing is written and nothing is called fine."""
    run("import", tmp_path, tmp_path / "new", "--format", "hf", "--step", "-4", code=2)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("argv", [
    ("ls", "absent"), ("verify", "absent"), ("verify", "ckpts", "--step", 5), ("diff", "ckpts", "absent"),
    ("export", "ckpts", "taken", "--format", "dcp"), ("export", "ckpts", "empty", "--format", "torch"),
    ("export", "ckpts", "out", "--format", "hf", "--config-from", "taken"), ("import", "absent", "new", "--format", "hf"),
])  # fmt: skip
def test_what_is_not_there_or_taken_is_a_usage_error(storage, tmp_path, monkeypatch, argv):
    """Said before anything is read or written, as exit code 2, by every command alike."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    run(*argv, code=2)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("argv", [
    ("export", "ckpts", "taken/out", "--format", "hf"), ("export", "ckpts", "taken/out", "--format", "dcp"),
    ("export", "ckpts", "taken/out", "--format", "torch"), ("export", "ckpts", "out", "--format", "dcp", "--prefix", "step"),
    ("import", "taken", "new", "--format", "hf"), ("import", "taken", "new", "--format", "dcp"),
    ("import", "model.safetensors", "taken/new", "--format", "hf"), ("verify", "empty"),
])  # fmt: skip
def test_what_cannot_be_read_or_written_is_told_in_a_line(storage, tmp_path, monkeypatch, argv):
    """A file in a folder's place and bytes of another kind: exit code 1, never a traceback (`run` would raise it)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "empty").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    done = run(*argv, code=1)
    assert done.stderr.startswith(("easyckpt: ", "nothing to verify"))


def test_an_export_makes_the_folders_above_it(storage, tmp_path):
    """For each format alike."""
    for kind in ("torch", "dcp", "hf"):
        run("export", storage, tmp_path / "new" / kind / "out", "--format", kind)
    assert torch.load(tmp_path / "new/torch/out", weights_only=True)["step"] == 3


def test_a_reader_that_has_enough_is_no_failure_and_the_module_runs_as_well(storage):
    """`python -m easyckpt.cli show X | head -1` ends fine, whoever closes the pipe first."""
    shown = subprocess.Popen(
        [sys.executable, "-m", "easyckpt.cli", "show", str(storage)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    shown.stdout.close()
    complaint = shown.stderr.read()
    shown.stderr.close()
    assert (shown.wait(60), complaint) == (0, b"")
    told = subprocess.run([sys.executable, "-m", "easyckpt.cli", "--help"], capture_output=True, text=True, check=True)
    assert "Exit codes" in told.stdout


def test_what_cannot_be_written_or_named_so_is_told_in_a_line(storage, tmp_path):
    """A place that takes no file is no traceback, and a role that is no name is a wrong use."""
    assert "/proc" in run("export", storage, "/proc/no/x.pt", "--format", "torch", code=1).stderr
    run("export", storage, tmp_path / "hf", "--format", "hf")
    assert "role" in run("import", tmp_path / "hf", tmp_path / "s", "--format", "hf", "--role", "../x", code=2).stderr
