import gzip
import io
import json
import subprocess
import sys
import tarfile
import zipfile

import pytest
import zstandard
from click.testing import CliRunner

from aimaster.cli.diagnose import diagnose
from tests.fakes.failure_cases import lay_out, load_cases
from tests.fakes.ray_head_log import ray_head_log

CASE = next(case for case in load_cases("failure_cases.jsonl") if case["id"] == "fc-002")


def run(*arguments, input=None):  # noqa: A002 - click's own word
    return CliRunner().invoke(diagnose, [str(one) for one in arguments], input=input)


def verdict(*arguments, input=None):  # noqa: A002
    result = run("--json", *arguments, input=input)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout), result.exit_code


def root_of(document):
    return document["category"], document["culprit"].get("node"), document["culprit"].get("rank")


def test_a_folder_per_node_gives_one_verdict_with_its_evidence(tmp_path):
    """The document names category, culprit, fault, action, confidence, the lines with file and number, and what was ruled out."""
    folder = lay_out(CASE, tmp_path)
    document, code = verdict(folder)
    assert code == 1
    assert root_of(document) == ("app.cuda_oom", "node-1", 13)
    assert (document["fault_of"], document["action"]) == ("user_code", "stop_job")
    assert 0.5 < document["confidence"] <= 1
    (root,) = [line for line in document["evidence"] if line["role"] == "self"]
    text = (folder / root["file"]).read_text().splitlines()
    assert text[root["line"] - 1] == root["text"]
    assert "ruled_out" in document
    assert "CUDA out of memory" in document["traceback"]


def pack_tar(folder, target, mode):
    with tarfile.open(target, mode) as archive:
        archive.add(folder, arcname="bundle")


def pack_zip(folder, target):
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in folder.rglob("*"):
            archive.write(path, f"bundle/{path.relative_to(folder)}")


@pytest.mark.parametrize("kind", ["logs.tar", "logs.tar.gz", "logs.tgz", "logs.tar.xz", "logs.tar.zst", "logs.zip"])
def test_archives_give_the_same_verdict(tmp_path, kind):
    """A bundle of the folder, however packed, is read like the folder."""
    folder = lay_out(CASE, tmp_path)
    target = tmp_path / kind
    if kind.endswith(".zip"):
        pack_zip(folder, target)
    elif kind.endswith(".zst"):
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as archive:
            archive.add(folder, arcname="bundle")
        target.write_bytes(zstandard.compress(plain.getvalue()))
    else:
        pack_tar(folder, target, {"logs.tar": "w", "logs.tar.xz": "w:xz"}.get(kind, "w:gz"))
    document, code = verdict(target)
    assert (root_of(document), code) == (("app.cuda_oom", "node-1", 13), 1)


def test_a_compressed_file_and_standard_input(tmp_path):
    """One log by itself, packed or through a pipe."""
    lines = "\n".join(next(log["lines"] for log in CASE["logs"] if log["node"] == "node-1")) + "\n"
    packed = tmp_path / "node-1.log.gz"
    packed.write_bytes(gzip.compress(lines.encode()))
    assert root_of(verdict(packed)[0]) == ("app.cuda_oom", "node-1", 13)
    document, code = verdict("-", input=lines)
    assert (document["category"], document["culprit"]["rank"], code) == ("app.cuda_oom", 13, 1)


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.zst", "zip"])
def test_an_archive_through_standard_input(tmp_path, kind):
    """A stream has no name: what it is, its first bytes tell."""
    folder = lay_out(CASE, tmp_path)
    packed = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(packed, "w") as archive:
            for path in folder.rglob("*.log"):
                archive.write(path, path.relative_to(folder))
    else:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(folder, arcname=folder.name)
    data = packed.getvalue()
    data = gzip.compress(data) if kind == "tar.gz" else zstandard.compress(data) if kind == "tar.zst" else data
    assert root_of(verdict("-", input=data)[0]) == ("app.cuda_oom", "node-1", 13)


def test_several_folders_are_several_nodes(tmp_path):
    """One path per node: each folder's name is its node."""
    folder = lay_out(CASE, tmp_path)
    document, _ = verdict(folder / "node-0", folder / "node-1")
    assert root_of(document) == ("app.cuda_oom", "node-1", 13)


def test_damaged_and_binary_files_are_named_not_fatal(tmp_path):
    """What cannot be read is reported beside the verdict of the rest."""
    folder = lay_out(CASE, tmp_path)
    (folder / "node-0" / "cut.tar.gz").write_bytes(gzip.compress(b"x" * 5000)[:40])
    (folder / "node-0" / "model.safetensors").write_bytes(b"\0" * 100)
    (folder / "node-0" / "blob.log").write_bytes(b"\0\1\2" * 100)
    document, code = verdict(folder)
    assert code == 1
    assert [(problem["name"], problem["why"]) for problem in document["read"]["unreadable"]][1:] == [
        (f"1 file of {folder}", "by their names they are no logs"),
        ("1 file", "binary: node-0/blob.log"),
    ]
    assert document["read"]["unreadable"][0]["name"] == "node-0/cut.tar.gz"


def test_text_says_the_verdict_what_to_do_and_what_was_ruled_out(tmp_path):
    """For people: one sentence, the advice, the marked root among the evidence."""
    out = run("--explain", lay_out(CASE, tmp_path)).stdout
    assert out.splitlines()[0].startswith("The program ran out of GPU memory on node-1 (rank 13, GPU 5, pid 4175)")
    assert "What to do: " in out
    assert "ROOT" in out
    assert "All statements" in out


def test_exit_codes(tmp_path):
    """0 nothing wrong, 1 a failure, 2 usage, 3 cannot tell."""
    good = tmp_path / "good.log"
    good.write_text("".join(f"2026-03-01 10:00:{s:02},000 INFO train: step={s} loss=1.0\n" for s in range(50)))
    strange = tmp_path / "strange.log"
    strange.write_text("srun: error: node-1: task 1: Exited with exit code 7\n")
    assert run(good).exit_code == 0
    assert run(strange).exit_code == 3
    assert run(tmp_path / "nothing").exit_code == 2
    assert run("--since", "yesterday-ish", good).exit_code == 2
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("disabel = []")
    assert run("--rules", wrong, good).exit_code == 2


def test_lines_no_sign_knows_are_offered_never_acted_upon(tmp_path):
    """Unknown failure: new alarming lines at the end are candidates with low confidence."""
    log = tmp_path / "odd.log"
    log.write_text(
        "".join(
            f"2026-03-01 10:{s // 60:02}:{s % 60:02},000 INFO loader: shard {s} error rate 0.0\n" for s in range(600)
        )
        + "2026-03-01 10:30:00,000 CRIT fluxcap: cannot hold phase, error 77\nsrun: error: n1: task 1: Exited with exit code 7\n"
    )
    document, code = verdict(log)
    assert (document["category"], code) == ("unknown", 3)
    assert document["candidates"][0]["text"].endswith("cannot hold phase, error 77")
    assert document["confidence"] <= 0.3


def test_since_and_until_choose_the_window(tmp_path):
    """Two failures on one day: the window decides which is judged."""
    log = tmp_path / "train.log"
    log.write_text(
        "2026-03-01 10:00:00,000 ERROR x\nOSError: [Errno 28] No space left on device\n"
        "2026-03-01 15:00:00,000 ERROR y\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 5 has a\n"
    )
    assert verdict("--until", "2026-03-01T12:00", log)[0]["category"] == "node.disk_full"
    assert verdict("--since", "2026-03-01T12:00", log)[0]["category"] == "app.cuda_oom"


def test_secrets_do_not_leave_in_excerpts(tmp_path):
    """A token in a decisive line is hidden in the output."""
    log = tmp_path / "train.log"
    log.write_text("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB password=hunter22 GPU 1\n")
    assert "hunter22" not in run("--json", "--explain", log).stdout


@pytest.mark.parametrize("loud_first", [True, False])
def test_the_failed_node_is_found_among_fifty_thousand_worker_exits(tmp_path, loud_first):
    """A Ray head log of 1,000 nodes: the truly failed one is named, whichever is louder first."""
    lines, truth = ray_head_log(loud_first=loud_first, seed=3 + loud_first)
    log = tmp_path / "gcs_server.out"
    with log.open("w") as out:
        out.writelines(line + "\n" for line in lines)
    document, code = verdict(log)
    assert (document["category"], document["culprit"]["node"], document["action"], code) == (*truth, 1)


def test_workers_that_ran_out_of_memory_at_startup_are_found(tmp_path):
    """While the cluster forms, one node's workers are killed for memory; the advice says what to change."""
    lines, truth = ray_head_log(nodes=200, followers=6000, startup=True)
    folder = tmp_path / "session_2026-06-24_10-00-00_1_2" / "logs"
    folder.mkdir(parents=True)
    (folder / "gcs_server.out").write_text("\n".join(lines) + "\n")
    document, _ = verdict(folder.parent)
    assert (document["category"], document["culprit"]["node"], document["action"]) == truth
    assert "memory" in document["advice"]


def test_help_is_quick_and_names_the_exit_codes():
    """`--help` imports nothing heavy and lists the exit codes."""
    probe = (
        "import sys; from aimaster.cli.diagnose import diagnose; "
        "heavy = {'torch', 'numpy', 'rich', 'aiohttp', 'zstandard', 'drain3'} & set(sys.modules); print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
    assert "3 cannot tell" in run("--help").stdout
