"""Thread budgets on fake machines, and the few system calls on the real one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import threads
from offload.errors import ConfigError
from offload.threads import (
    Budget,
    allowed_cpus,
    bind_current_thread,
    cgroup_quota,
    configure_cpu_optimizer_threads,
    cpus_of_node,
    numa_node_of_gpu,
    parse_cpu_list,
    thread_budget,
)

has_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")


def budgets(masks: list[set[int]], quota: float | None = None) -> list[Budget]:
    """Every rank's budget on one host."""
    return [thread_budget(mask, masks[:i] + masks[i + 1 :], quota) for i, mask in enumerate(masks)]


def cpus(first: int, last: int) -> set[int]:
    return set(range(first, last + 1))


@pytest.mark.parametrize(
    ("masks", "quota", "expected"),
    [
        pytest.param([cpus(0, 59)] * 4 + [cpus(60, 119)] * 4, None, [14] * 8, id="two-sockets"),
        pytest.param([cpus(0, 119)] * 8, None, [14] * 8, id="one-shared-mask"),
        pytest.param([cpus(15 * i, 15 * i + 14) for i in range(8)], None, [14] * 8, id="disjoint"),
        pytest.param([cpus(0, 119)] * 8, 16.0, [2] * 8, id="quota-shared"),
        pytest.param([cpus(0, 119)], 2.0, [2], id="quota-of-2"),
        pytest.param([cpus(0, 119)], 2.9, [2], id="quota-fraction"),
        pytest.param([cpus(0, 119)], 500.0, [119], id="quota-wider-than-mask"),
        pytest.param([cpus(0, 2)], None, [3], id="taskset-3"),
        pytest.param([cpus(0, 3)], None, [3], id="four-leaves-one"),
        pytest.param([cpus(0, 0)], None, [1], id="single-cpu"),
        pytest.param([cpus(0, 7), cpus(0, 3)], None, [5, 2], id="nested-masks"),
        pytest.param([cpus(0, 2)] * 2, None, [1, 1], id="odd-split"),
    ],
)
def test_budgets_of_known_machines(masks: list[set[int]], quota: float | None, expected: list[int]) -> None:
    result = budgets(masks, quota)
    assert [budget.num_threads for budget in result] == expected
    assert not any(budget.oversubscribed for budget in result)
    assert [set(budget.cpus) for budget in result] == masks


def test_more_ranks_than_cpus_get_one_each_and_are_told() -> None:
    for budget in budgets([{0, 1}] * 3):
        assert budget.num_threads == 1
        assert budget.oversubscribed
        assert "minimum of one" in budget.reason


def test_reasons_are_in_plain_words() -> None:
    assert thread_budget(cpus(0, 15), [cpus(0, 15)], 10.0).reason == (
        "16 CPUs in the mask, 8 of them for this one of 2 local ranks, "
        "cut to 5 by the cgroup quota of 10, one left to the launching thread"
    )


def test_an_empty_mask_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        thread_budget(set(), [], None)


@given(
    masks=st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=9),
    quota=st.none() | st.floats(0.1, 32.0),
)
def test_all_ranks_together_never_exceed_what_there_is(masks: list[set[int]], quota: float | None) -> None:
    """But for the minimum of one: what is more than that adds up to no more than the CPUs, or the quota."""
    result = budgets(masks, quota)
    assert all(1 <= budget.num_threads <= len(budget.cpus) for budget in result)
    regular = sum(budget.num_threads for budget in result if not budget.oversubscribed)
    assert regular <= len(set().union(*masks))
    assert quota is None or regular <= quota
    for chosen in masks:  # ranks that fit wholly into a mask stay within it
        inside = [
            b.num_threads
            for b, mask in zip(result, masks, strict=True)
            if mask <= chosen and not b.oversubscribed
        ]
        assert sum(inside) <= len(chosen)


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_are_read_as_the_kernel_writes_them(wanted: set[int]) -> None:
    runs: list[list[int]] = []
    for cpu in sorted(wanted):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "\n"
    assert parse_cpu_list(text) == wanted


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")


V1_LINE = "4:memory:/job\n3:cpu,cpuacct:/job/step\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0, id="v2-in-container"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, None, id="v2-unlimited"),
        pytest.param(
            "0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "4000 1000"},
            1.5, id="v2-tightest-is-above",
        ),
        pytest.param("0::/../../x\n", {"cpu.max": "300000 100000"}, 3.0, id="v2-outside-namespace"),
        pytest.param("0::/not/visible\n", {"cpu.max": "300000 100000"}, 3.0, id="v2-host-path"),
        pytest.param(
            V1_LINE, {"cpu,cpuacct/job/step/cpu.cfs_quota_us": "250000",
                      "cpu,cpuacct/job/step/cpu.cfs_period_us": "100000"}, 2.5, id="v1",
        ),
        pytest.param(
            V1_LINE, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000",
                      "cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"},
            0.5, id="v1-nested",
        ),
        pytest.param(
            V1_LINE + "0::/u\n", {"unified/u/cpu.max": "700000 100000", "cpu/job/step/cpu.cfs_quota_us": "-1",
                                  "cpu/job/step/cpu.cfs_period_us": "100000"}, 7.0, id="hybrid",
        ),
        pytest.param("", {}, None, id="nothing"),
    ],
)  # fmt: skip
def test_quotas(tmp_path: Path, own: str, files: dict[str, str], expected: float | None) -> None:
    write(tmp_path / "proc", {"self/cgroup": own})
    write(tmp_path / "sys/fs/cgroup", files)
    assert cgroup_quota(proc=tmp_path / "proc", sys=tmp_path / "sys") == expected


def test_a_system_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(proc=tmp_path, sys=tmp_path) is None


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """120 CPUs and 8 GPUs on two NUMA nodes, no siblings. Returns the root of sysfs."""
    files = {"devices/system/node/node0/cpulist": "0-59\n", "devices/system/node/node1/cpulist": "60-119\n"}
    for gpu in range(8):
        files[f"bus/pci/devices/0000:{16 + gpu:02x}:00.0/numa_node"] = f"{gpu // 4}\n"
    write(tmp_path, files)

    def properties(device: torch.device | int) -> SimpleNamespace:
        index = device if isinstance(device, int) else device.index
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=16 + index, pci_device_id=0)

    monkeypatch.setattr(threads, "allowed_cpus", lambda: cpus(0, 119))
    monkeypatch.setattr(threads, "_sibling_masks", lambda num_ranks: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", *threads._PLACING_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def configure(
    root: Path, rank: int = 0, num_ranks: int = 1, gpu: int | None = None, **options: object
) -> Budget:
    device = None if gpu is None else torch.device("cuda", gpu)
    return configure_cpu_optimizer_threads(
        local_rank=rank, local_world_size=num_ranks, device=device, proc=root, sys=root, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_eight_ranks_are_bound_to_the_node_of_their_gpu(two_sockets: Path) -> None:
    for rank in range(8):
        budget = configure(two_sockets, rank, 8, gpu=rank)
        assert budget.num_threads == 14
        assert budget.cpus == (cpus(0, 59) if rank < 4 else cpus(60, 119))


def test_without_numa_binding_the_whole_mask_is_shared(two_sockets: Path) -> None:
    budget = configure(two_sockets, 5, 8, gpu=5, numa_bind=False)
    assert (budget.num_threads, set(budget.cpus)) == (14, cpus(0, 119))
    assert configure(two_sockets, 5, 8).cpus == cpus(0, 119)


def test_one_rank_of_a_multi_gpu_host_has_its_node(two_sockets: Path) -> None:
    budget = configure(two_sockets, gpu=6)
    assert (budget.num_threads, set(budget.cpus)) == (59, cpus(60, 119))


def test_unknown_peers_may_all_be_on_our_node(two_sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One visible GPU per rank: the guess errs towards too few threads; known masks put it right."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert configure(two_sockets, 5, 8, gpu=0).num_threads == 6
    peers = [cpus(0, 59)] * 3 + [cpus(60, 119)] * 4
    assert configure(two_sockets, 5, 8, gpu=0, peer_masks=peers).num_threads == 14


def test_disjoint_masks_of_sibling_processes_are_seen(
    two_sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "allowed_cpus", lambda: cpus(0, 14))
    assert configure(two_sockets, 0, 8, gpu=0).num_threads == 1
    siblings = [cpus(15 * i, 15 * i + 14) for i in range(1, 8)]
    monkeypatch.setattr(threads, "_sibling_masks", lambda num_ranks: siblings)
    assert configure(two_sockets, 0, 8, gpu=0).num_threads == 14


def test_a_mask_that_misses_the_gpus_node_is_kept(two_sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "allowed_cpus", lambda: cpus(0, 9))
    assert configure(two_sockets, gpu=7).cpus == cpus(0, 9)


def test_a_gpu_of_unknown_node(two_sockets: Path) -> None:
    write(two_sockets, {"bus/pci/devices/0000:10:00.0/numa_node": "-1\n"})
    assert numa_node_of_gpu(torch.device("cuda", 0), sys=two_sockets) is None
    assert numa_node_of_gpu(torch.device("cuda", 4), sys=two_sockets) == 1
    assert cpus_of_node(7, sys=two_sockets) == set()
    assert configure(two_sockets, gpu=0).cpus == cpus(0, 119)


def test_the_environment_names_rank_and_world(two_sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert configure_cpu_optimizer_threads(proc=two_sockets, sys=two_sockets).num_threads == 14
    monkeypatch.setenv("LOCAL_RANK", "9")
    with pytest.raises(ConfigError, match="local rank 9 of 8"):
        configure_cpu_optimizer_threads()
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ConfigError, match="LOCAL_RANK='x'"):
        configure_cpu_optimizer_threads()


def test_an_explicit_count_wins_and_is_compared(two_sockets: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert configure(two_sockets, num_threads=3).num_threads == 3
    assert not caplog.records
    budget = configure(two_sockets, 0, 8, num_threads=30)
    assert budget.num_threads == 30
    assert "more than its share" in caplog.text
    with pytest.raises(ConfigError, match="num_threads=0"):
        configure(two_sockets, num_threads=0)


def test_the_decision_is_one_line_of_log(two_sockets: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "offload"):
        configure(two_sockets, 2, 8, gpu=2)
    (record,) = caplog.records
    assert record.getMessage() == (
        "rank 2: 14 CPU optimizer threads: 60 CPUs in the mask, 15 of them for this one of 8 local ranks, "
        "one left to the launching thread"
    )


@pytest.mark.parametrize("name", threads._PLACING_VARIABLES)
def test_variables_that_place_threads_are_warned_of(
    two_sockets: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(name, "close")
    configure(two_sockets)
    assert f"{name}=close" in caplog.text


def test_nothing_of_the_process_changes() -> None:
    """F37."""
    before = torch.get_num_threads(), allowed_cpus()
    configure_cpu_optimizer_threads(local_rank=0, local_world_size=1)
    assert (torch.get_num_threads(), allowed_cpus()) == before


@has_affinity
def test_binding_touches_the_calling_thread_alone() -> None:
    before = allowed_cpus()
    chosen = {min(before)}
    seen: list[set[int]] = []

    def bind() -> None:
        assert bind_current_thread(chosen)
        seen.append(allowed_cpus())
        heir = threading.Thread(target=lambda: seen.append(allowed_cpus()))
        heir.start()
        heir.join(10)

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join(10)
    assert seen == [chosen, chosen]
    assert allowed_cpus() == before


def test_binding_that_is_impossible_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert not bind_current_thread(set())
    if hasattr(os, "sched_setaffinity"):
        assert not bind_current_thread({1_000_000})
        assert "could not bind" in caplog.text


@has_affinity
@pytest.mark.parametrize("num_cpus", [1, 2, 3])
def test_a_process_confined_to_few_cpus(num_cpus: int) -> None:
    """F40: as ``taskset`` does it."""
    chosen = sorted(allowed_cpus())[:num_cpus]
    if len(chosen) < num_cpus:
        pytest.skip(f"this machine allows {len(chosen)} CPUs")
    script = f"""
        import os
        os.sched_setaffinity(0, {chosen})
        from offload.threads import configure_cpu_optimizer_threads
        budget = configure_cpu_optimizer_threads(local_rank=0, local_world_size=1)
        assert budget.cpus == set({chosen}) and budget.num_threads <= {num_cpus}, budget
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


@has_affinity
def test_siblings_are_the_launchers_other_children() -> None:
    """Two real ranks, each bound by its launcher; the second is the launcher's last child when it looks."""
    first, last = min(allowed_cpus()), max(allowed_cpus())
    if first == last:
        pytest.skip("needs two CPUs")
    rank = """
        import os, sys
        os.sched_setaffinity(0, {int(sys.argv[1])})
        from offload.threads import _sibling_masks
        print("bound", flush=True)
        sys.stdin.readline()
        print(sorted(_sibling_masks(2)[0]), _sibling_masks(3), flush=True)
        sys.stdin.readline()
    """
    launcher = f"""
        import subprocess, sys
        rank = {textwrap.dedent(rank)!r}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        command = [sys.executable, "-c", rank]
        ranks = [subprocess.Popen([*command, cpu], **pipes) for cpu in ("{first}", "{last}")]
        for step in range(2):
            for process in ranks:
                print(process.stdout.readline().strip())
            for process in ranks:
                process.stdin.write("go\\n"); process.stdin.flush()
        for process in ranks:
            process.wait(30)
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(launcher)],
        check=True,
        timeout=90,
        capture_output=True,
        text=True,
    ).stdout
    assert output.split("\n")[2:4] == [f"[{last}] None", f"[{first}] None"]


def test_a_launcher_that_cannot_be_read_has_no_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> psutil.Process:
        raise psutil.AccessDenied(pid)

    monkeypatch.setattr(psutil, "Process", refuse)
    assert threads._sibling_masks(2) is None
