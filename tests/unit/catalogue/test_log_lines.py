from datetime import UTC, datetime

import pytest

from aimaster.catalogue.lines import complete, read_progress, read_speaker, read_stamp, unwrap
from aimaster.catalogue.names import MOST_HOSTS, expand_hosts

NEAR = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("line", "when"),
    [
        ("2025-06-12 03:11:00,017 INFO train: step=8801", "2025-06-12T03:11:00.017"),
        ("2025-06-12T03:11:00.5+08:00 x", "2025-06-11T19:11:00.5"),
        ("[rank0]:[E203 11:11:12.063471326 ProcessGroupNCCL.cpp:632] [Rank 0] W", "2026-02-03T11:11:12.063471"),
        ("[rank8]:[E1118 20:32:23.955028747 ProcessGroupNCCL.cpp:632] x", "2025-11-18T20:32:23.955028"),
        ("W0203 09:26:10.056000 4101 torch/distributed/run.py:792] x", "2026-02-03T09:26:10.056"),
        ("Feb 14 05:03:41 node-4 kernel: NVRM: x", "2026-02-14T05:03:41"),
        ("[Mon Sep 22 22:02:07 2025] NVRM: x", "2025-09-22T22:02:07"),
        ("[2025-06-24 17:01:48,107 I 65 65] (gcs_server) x", "2025-06-24T17:01:48.107"),
        ("INFO 11-19 11:46:02 [llm_engine.py:72] x", "2025-11-19T11:46:02"),
        ("      Finished:     Tue, 24 May 2022 08:12:08 +0000", "2022-05-24T08:12:08"),
        (
            "slurmstepd: error: *** JOB 9 ON n CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***",
            "2024-04-20T09:09:37",
        ),
        ("17:19:36 INFO trainer: step 4410", "2026-03-01T17:19:36"),
        ("[sidecar] 10:02:40 nvmlInit", "2026-03-01T10:02:40"),
    ],
)
def test_times_are_read_from_the_usual_formats(line, when):
    """Each program's way of writing time is understood; what a line leaves out comes from the collection."""
    stamp = read_stamp(line.encode())
    assert stamp is not None
    assert complete(stamp, NEAR) == pytest.approx(
        datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp(), abs=0.001
    )


@pytest.mark.parametrize(
    "line", ["no time here", "ratio 12:34", "[2204087.981563] IPv6: ready", "version 2025-13-45 99:99:99"]
)
def test_what_is_no_time_is_not_read_as_one(line):
    """Seconds since boot and impossible dates are no times."""
    assert read_stamp(line.encode()) is None


@pytest.mark.parametrize(
    ("line", "rank", "pid", "gpu", "host"),
    [
        ("[rank13]: torch.OutOfMemoryError: x", 13, None, None, ""),
        (
            "(FSDPPolicyWorkerBase pid=2101, ip=10.1.140.190) [rank0]:[E502 18:20:05.0 P] x",
            0,
            2101,
            None,
            "10.1.140.190",
        ),
        ("node-5:51877:52310 [3] transport/net_ib.cc:1295 NCCL WARN x", None, 51877, "3", "node-5"),
        ("Feb 14 05:03:41 node-4 kernel: NVRM: x", None, None, None, "node-4"),
        ("[node-1:4512] Signal: Segmentation fault (11)", None, 4512, None, "node-1"),
        ("(EngineCore_DP0 pid=771) ERROR x", None, 771, None, ""),
        ("[1,3]<stderr>:boom", 3, None, None, ""),
        (" 12: step 100 loss 3.0", 12, None, None, ""),
        ("plain text", None, None, None, ""),
    ],
)
def test_prefixes_say_who_speaks(line, rank, pid, gpu, host):
    """Rank, process, GPU and host are taken from the prefixes of torchrun, Ray, NCCL, syslog, MPI, vLLM and Slurm."""
    speaker = read_speaker(line.encode())
    assert (speaker.subject.rank, speaker.subject.pid, speaker.subject.gpu, speaker.host) == (rank, pid, gpu, host)


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("2026-03-01 10:00:00 INFO train: step=8801 loss=1.9", 8801),
        (
            " [2025-06-20 14:59:40] iteration       60/  500000 | consumed samples: 3 | number of nan iterations:   0 |",
            60,
        ),
        ("{'loss': 1.2, 'learning_rate': 1.9e-05, 'epoch': 9.9}", 9.9),
        ("mmrotate - INFO - Epoch [3][50/2100] lr: 5.000e-03", 3),
        ("Validation DataLoader 0:  98%|#########8| 97/99 [01:10<00:01,  1.37it/s]", 97),
        ("(Trainer pid=311) iter 40 reward 21.40", 40),
    ],
)
def test_progress_is_learnt_from_log_lines(line, number):
    """Steps, iterations and progress bars count as progress."""
    assert [step.number for step in read_progress(line.encode())] == [number]


@pytest.mark.parametrize(
    "line",
    [
        "17:33:36 WARNING trainer: no step finished for 900 s",
        "ERROR: Unexpected result nan on rank 3 at iteration #3",
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536",
        "step=5 loss=nan",
    ],
)
def test_talk_about_steps_is_no_progress(line):
    """Warnings, errors and NaN losses that mention a step are no progress."""
    assert read_progress(line.encode()) == []


@pytest.mark.parametrize(
    ("line", "host"),
    [
        (b"worker-1: [rank8]:[E1101 17:03:05.8 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 8] Exception", "worker-1"),
        (b"202.197.0.170: [2026-11-03 10:00:00,100] [INFO] [launch.py:319:sigkill_handler] Killing", "202.197.0.170"),
        (b"[pod/train-worker-1/pytorch] 2026-03-01 10:00:00,000 INFO train: step=1", "train-worker-1"),
        (b"worker-3  | Traceback (most recent call last):", "worker-3"),
        (b"2026-05-18T08:00:01.112233+00:00 b300-4 kernel: NVRM: Xid (PCI:0000:dc:00): 149, x", "b300-4"),
        (b"2026-05-18T08:00:01Z ERROR loader: cannot read", ""),
        (b"step3: loss went down", ""),
        (b"epoch 2: [####]", ""),
    ],
)
def test_a_joined_log_names_the_node_of_each_line(line, host):
    """pdsh, kubectl, compose and syslog put the node before the line; words that only look like it do not count."""
    assert read_speaker(line).host == host


@pytest.mark.parametrize(
    "line",
    [
        b"2026-03-01T10:00:07.123456789+00:00 stderr F [rank3]: ValueError: x",
        b"2026-03-01T10:00:07Z [rank3]: ValueError: x",
        b'{"log":"[rank3]: ValueError: x\\n","stream":"stderr","time":"2026-03-01T10:00:07.1Z"}',
        b"\x1b[36m[rank3]:\x1b[0m ValueError: x",
    ],
)
def test_what_a_container_runtime_adds_is_taken_off(line):
    """The program's own words come out of CRI files, json-file logs, stamped and coloured output; the time is still read."""
    assert unwrap(line) == b"[rank3]: ValueError: x"
    stamp = read_stamp(line)
    assert stamp is None or stamp.seconds == pytest.approx(1772359207, abs=0.2)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu-[07-08]", ["gpu-07", "gpu-08"]),
        ("gpu-[07-08,11],m3", ["gpu-07", "gpu-08", "gpu-11", "m3"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("cn-014", ["cn-014"]),
        ("fe80[eth0]", ["fe80[eth0]"]),
    ],
)
def test_short_forms_of_many_hosts_are_spelt_out(text, hosts):
    """Slurm writes neighbours as one name with a range; each is a host of its own, with its zeros."""
    assert expand_hosts(text) == hosts


def test_a_short_form_names_a_bounded_number_of_hosts():
    """A range over a whole cluster stays a bounded list."""
    assert len(expand_hosts("n[0-999999],m[0-999]")) == MOST_HOSTS
