"""What the cgroup leaves, read from made-up trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.memory import cgroup_memory_left

V2 = "0::/pod/job\n"
V1 = "5:cpu,cpuacct:/pod\n9:memory:/pod/job\n"


def left(root: Path, cgroup: str, files: dict[str, object]) -> int | None:
    """`cgroup_memory_left` on a tree of ``path: content`` below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return cgroup_memory_left(proc=root / "proc", sys=root / "sys")


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        pytest.param(V2, {"pod/job/memory.max": 100, "pod/job/memory.current": 30}, 70, id="v2"),
        pytest.param(
            V2, {"pod/job/memory.max": "max", "pod/job/memory.current": 30}, None, id="v2 unlimited"
        ),
        pytest.param(V2, {"pod/job/memory.max": 100, "pod/job/memory.current": 130}, 0, id="over the limit"),
        pytest.param(
            V2,
            {
                "pod/job/memory.max": 100,
                "pod/job/memory.current": 30,
                "pod/memory.max": 200,
                "pod/memory.current": 190,
            },
            10,
            id="the tightest is above",
        ),
        pytest.param(V2, {"memory.max": 100, "memory.current": 1}, 99, id="own cgroup mounted as the root"),
        pytest.param(V2, {"pod/job/memory.max": 100}, None, id="usage unknown"),
        pytest.param(
            V1,
            {"memory/pod/job/memory.limit_in_bytes": 100, "memory/pod/job/memory.usage_in_bytes": 40},
            60,
            id="v1",
        ),
        pytest.param(
            V1,
            {
                "memory/pod/job/memory.limit_in_bytes": 9223372036854771712,
                "memory/pod/job/memory.usage_in_bytes": 40,
            },
            None,
            id="v1 unlimited",
        ),
        pytest.param(
            "1:memory:/../other\n",
            {"memory/memory.limit_in_bytes": 8, "memory/memory.usage_in_bytes": 3},
            5,
            id="outside the namespace",
        ),
        pytest.param("", {}, None, id="no cgroup"),
    ],
)
def test_memory_left(tmp_path: Path, cgroup: str, files: dict[str, object], expected: int | None) -> None:
    assert left(tmp_path, cgroup, files) == expected


def test_no_proc_means_no_limit(tmp_path: Path) -> None:
    assert cgroup_memory_left(proc=tmp_path, sys=tmp_path) is None


def test_this_machine_can_be_read() -> None:
    here = cgroup_memory_left()
    assert here is None or here >= 0
