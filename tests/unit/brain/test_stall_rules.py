from aimaster.brain.diagnose import diagnose
from aimaster.wire.health import Evidence, Finding, Subject

T0 = 1_772_000_000.0


def finding(
    sign,
    category,
    role,
    *,
    node="n1",
    at=T0,
    weight=50,
    rank=None,
    about=None,
    severity="error",
    kind="sign",
    **details,
):
    proof = Evidence(
        node=node,
        file=f"{node}/train.log",
        offset=int(at - T0) + 1000,
        time_seconds=at,
        text=f"{sign}",
        role=role,
        sign=sign,
    )
    return Finding(
        sign=sign,
        category=category,
        role=role,
        kind=kind,
        severity=severity,
        subject=Subject(node=about or node, rank=rank),
        node=node,
        time_seconds=at,
        weight=weight,
        details={name: str(value) for name, value in details.items()},
        evidence=(proof,),
    )


def watchdog(rank, node, seq=900, op="ALLREDUCE", at=T0 + 1800):
    return finding(
        "torch.watchdog-timeout",
        "hang.unknown",
        "follower",
        node=node,
        rank=rank,
        at=at,
        weight=15,
        seq=seq,
        op=op,
        timeout_ms=1800000,
    )


def progress(node, at, number=5):
    return finding("progress", "benign", "benign", node=node, at=at, kind="progress", severity="info", number=number)


def test_followers_never_win():
    """However many and however early the echoes, the one statement about oneself is the root."""
    echoes = [watchdog(rank, f"n{rank // 8}", at=T0 + rank) for rank in range(64)]
    root = finding("nvidia.xid", "gpu.lost", "self", node="n9", at=T0 + 100, weight=90, severity="critical")
    got = diagnose([*echoes, root], T0 + 9000)
    assert (got.category, got.culprit.node) == ("gpu.lost", "n9")


def test_the_earliest_statement_wins_over_later_ones():
    """Two nodes fail by themselves: the first is the root, the other is ruled out with the reason."""
    first = finding("torch.cuda-oom", "app.cuda_oom", "self", node="n1", at=T0, weight=80)
    later = finding(
        "kernel.panic", "node.kernel_fault", "self", node="n2", at=T0 + 3000, weight=90, severity="critical"
    )
    got = diagnose([later, first], T0 + 9000)
    assert (got.category, got.culprit.node) == ("app.cuda_oom", "n1")
    assert any(one.category == "node.kernel_fault" and "after the root" in one.why for one in got.ruled_out)


def test_the_deeper_cause_of_one_moment_wins():
    """An exception a few seconds before the kernel's line on the same node is its symptom."""
    symptom = finding("python.exception", "app.exception", "self", at=T0)
    cause = finding("nvidia.xid", "gpu.lost", "self", at=T0 + 20, weight=90, severity="critical")
    assert diagnose([symptom, cause], T0 + 60).category == "gpu.lost"


def test_votes_name_the_silent_peer():
    """Completion errors of three nodes about one peer accuse that peer."""
    votes = [
        finding("nccl.completion-error", "net.rdma_error", "accusation", node=f"n{i}", about="n7", weight=60)
        for i in (1, 2, 3)
    ]
    stray = finding("nccl.completion-error", "net.rdma_error", "accusation", node="n1", about="n2", weight=60)
    got = diagnose([stray, *votes], T0 + 60)
    assert (got.category, got.culprit.node) == ("net.rdma_error", "n7")


def test_who_accuses_everybody_accuses_himself():
    """One node that reports errors from all its peers has the broken port."""
    votes = [
        finding("nccl.completion-error", "net.rdma_error", "accusation", node="n1", about=f"n{i}", weight=60)
        for i in (2, 3, 4)
    ]
    assert diagnose(votes, T0 + 60).culprit.node == "n1"


def test_a_statement_about_oneself_outweighs_votes():
    """The peer that all accuse lost its port by its own word: that is the category."""
    votes = [
        finding("nccl.completion-error", "net.rdma_error", "accusation", node=f"n{i}", about="n7", weight=60)
        for i in (1, 2)
    ]
    own = finding("nccl.port-error", "net.port_down", "self", node="n7", at=T0 + 30, weight=85, severity="critical")
    assert diagnose([*votes, own], T0 + 60).category == "net.port_down"


def test_equal_numbers_everywhere_blame_nobody():
    """All ranks wait at the same number: a hang without a culprit."""
    got = diagnose([watchdog(0, "n1"), watchdog(8, "n2")], T0 + 9000)
    assert (got.category, got.culprit.node, got.action) == ("hang.unknown", None, "restart_process")


def test_the_rank_behind_is_named():
    """The rank with the smallest last enqueued number is the straggler."""
    behind = finding(
        "torch.last-enqueued", "hang.unknown", "follower", node="n2", rank=9, at=T0 + 1801, weight=12, enqueued=899
    )
    got = diagnose([watchdog(0, "n1"), watchdog(1, "n1"), watchdog(8, "n2"), behind], T0 + 9000)
    assert (got.category, got.culprit.rank, got.culprit.node) == ("hang.straggler", 9, "n2")


def test_other_operations_at_one_number_are_a_mismatch():
    """The program diverged; no node is to blame."""
    got = diagnose([watchdog(0, "n1"), watchdog(8, "n2", op="BROADCAST")], T0 + 9000)
    assert (got.category, got.culprit.node, got.action) == ("app.collective_mismatch", None, "stop_job")


def test_an_announced_end_explains_what_follows():
    """Preemption first: hardware texts of the survivors come after it and are ruled out."""
    notice = finding(
        "kubernetes.preempted", "sched.preempted", "self", node="n3", at=T0, weight=92, kind="announcement"
    )
    echo = finding("nvidia.xid", "gpu.nvlink", "self", node="n1", at=T0 + 40, weight=90, severity="critical")
    got = diagnose([echo, notice], T0 + 600)
    assert (got.category, got.culprit.node, got.action) == ("sched.preempted", "n3", "reform_without")
    assert [one.category for one in got.ruled_out] == ["gpu.nvlink"]


def test_what_broke_before_the_announced_end_stays_the_root():
    """A GPU lost an hour before the time limit is why the job stood still until then."""
    lost = finding("nvidia.xid", "gpu.lost", "self", node="n1", at=T0, weight=90, severity="critical")
    notice = finding(
        "slurm.time-limit", "sched.time_limit", "self", node="login", at=T0 + 3600, weight=90, kind="announcement"
    )
    assert diagnose([lost, notice], T0 + 4000).category == "gpu.lost"


def test_progress_afterwards_cancels():
    """The job went on for minutes after the line: nothing failed."""
    scare = finding("torch.illegal-access", "app.illegal_access", "self", at=T0, weight=62)
    got = diagnose([scare, progress("n2", T0 + 300)], T0 + 400)
    assert (got.category, got.action) == ("benign", "ignore")
    assert got.ruled_out[0].why == "the job went on after it"


def test_a_few_more_steps_forgive_nothing_when_the_job_ends_badly():
    """Other ranks finish a step after the fault; then all stop: the fault is the root."""
    fault = finding("nvidia.nvml-unknown-error", "gpu.access_lost", "self", at=T0, weight=75)
    got = diagnose([fault, progress("n1", T0 + 15), watchdog(0, "n1")], T0 + 9000)
    assert got.category == "gpu.access_lost"


def test_the_same_error_on_all_nodes_blames_no_node():
    """Shared code fails everywhere at once."""
    same = [
        finding("python.exception", "app.exception", "self", node=f"n{i}", rank=i, at=T0 + i, exception="KeyError")
        for i in range(4)
    ]
    got = diagnose(same, T0 + 60)
    assert (got.category, got.culprit.node) == ("app.exception", None)


def test_nothing_said_nothing_wrong():
    """No findings: benign, ignore."""
    got = diagnose([], T0)
    assert (got.category, got.action, got.culprit.node) == ("benign", "ignore", None)


def test_numbers_of_different_process_groups_are_not_compared():
    """A tensor-parallel and a data-parallel group wait in other operations at one number: no mismatch, nobody behind."""
    tensor = finding(
        "torch.watchdog-timeout",
        "hang.unknown",
        "follower",
        node="n1",
        rank=0,
        weight=15,
        seq=77,
        op="_ALLGATHER_BASE",
        pg="5(tp)",
    )
    data = finding(
        "torch.watchdog-timeout",
        "hang.unknown",
        "follower",
        node="n2",
        rank=8,
        weight=15,
        seq=77,
        op="ALLREDUCE",
        pg="9(dp)",
    )
    later = [
        finding(
            "torch.last-enqueued", "hang.unknown", "follower", node="n3", rank=r, weight=12, enqueued=990, pg="9(dp)"
        )
        for r in (9, 10)
    ]
    got = diagnose([tensor, data], T0 + 9000)
    assert got.category == "hang.unknown"
    behind = diagnose([tensor, data, *later], T0 + 9000)
    assert (behind.category, behind.culprit.rank) == ("hang.straggler", 8)


def test_steps_within_the_notice_do_not_take_it_back():
    """Two minutes of steps after a spot notice, then everybody dies: it was the notice."""
    notice = finding(
        "kubernetes.spot-notice", "sched.preempted", "self", node="n3", at=T0, weight=90, kind="announcement"
    )
    got = diagnose([notice, progress("n3", T0 + 110), watchdog(0, "n1", at=T0 + 1900)], T0 + 2000)
    assert (got.category, got.culprit.node) == ("sched.preempted", "n3")


def test_a_killed_process_is_a_failure_even_without_a_reason():
    """Nobody says who sent SIGKILL; that something ended badly is certain."""
    killed = finding("python.killed", "process.killed", "self", node="n1", at=T0, weight=40)
    assert diagnose([killed], T0 + 60).category == "process.killed"
    assert diagnose([killed, progress("n1", T0 + 300)], T0 + 400).category == "benign"


def test_what_a_rank_prints_into_its_launchers_log_is_placed_where_it_ran():
    """The exception of task 3 stands in srun's own output on the login node; srun says that task 3 ran on gpu-2."""
    raised = finding("python.exception", "app.exception", "self", node="login", rank=3, exception="KeyError")
    ended = finding("slurm.task-exit", "unknown", "follower", node="login", weight=16, on="gpu-2", task=3, exit_code=1)
    got = diagnose([raised, ended], T0 + 60)
    assert (got.category, got.culprit.node, got.culprit.rank) == ("app.exception", "gpu-2", 3)
