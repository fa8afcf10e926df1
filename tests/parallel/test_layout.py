"""Rank arithmetic, the launchers' environments, and the shared output folder."""

import re
from pathlib import Path
from unittest import mock

import pytest

from ds_vit.fault_tolerance.errors import EndedTogether
from ds_vit.launching.process import Process, discover, rendezvous
from ds_vit.parallel.layout import AXES, Layout, check_tp_inside_hosts, placement_rows
from ds_vit.training.output import check_folder, check_shared


def test_dp_rank_follows_deepspeeds_topology():
    """Coordinates that differ from DeepSpeed's grid would load another rank's samples."""
    from deepspeed.runtime.pipe.topology import ProcessTopology

    layout = Layout(pp=2, dp=3, tp=2)
    topology = ProcessTopology(axes=list(AXES), dims=list(layout.dims))
    for rank in range(12):
        coordinates = topology.get_coord(rank)
        assert layout.dp_rank(rank) == coordinates.data
        assert layout.stage(rank) == coordinates.pipe
        assert layout.tp_rank(rank) == coordinates.model


def test_of_world():
    """A world that pp x tp does not divide must be refused with the numbers."""
    assert Layout.of_world(8, pp=2, tp=2) == Layout(2, 2, 2)
    with pytest.raises(ValueError, match=re.escape("6 ranks cannot be split into --pp 2 x --tp 2 = 4")):
        Layout.of_world(6, pp=2, tp=2)


SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Process("none", 0, 1, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Process("env", 3, 4, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, Process("env", 1, 2, 1, 2)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            },
            Process("openmpi", 1, 2, 0, 1),
        ),
        (SRUN, Process("slurm", 4, 5, 0, 1)),
        (SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5"}, Process("slurm", 4, 5, 0, 1)),
        (SRUN | {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, Process("mpich", 0, 2, 0, None)),
        (SRUN | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, Process("env", 1, 2, 1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0"}, Process("none", 0, 1, 0, 1)),
    ],
)
def test_discover(environ, expected):
    """A launcher whose rank is not found trains N times alone."""
    assert discover(environ) == expected
    assert expected.spans_hosts == (expected.world_size != expected.local_world_size)


@pytest.mark.parametrize("environ", [{"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_discover_refuses_a_broken_environment(environ):
    """A stray RANK must not hang the start."""
    with pytest.raises(ValueError, match="RANK"):
        discover(environ)


def test_plain_python_meets_itself():
    """`python launch/train.py` must not need anybody's port 29500."""
    environ: dict[str, str] = {}
    assert rendezvous(Process("none", 0, 1, 0, 1), environ) == {"auto_mpi_discovery": False}
    assert environ["WORLD_SIZE"] == "1"
    assert environ["MASTER_PORT"] != "29500"


def test_where_the_ranks_of_srun_and_mpirun_meet():
    """Ranks of one run that look for each other at different places wait for ten minutes."""
    environ = dict(SRUN)
    slurm = {"init_method": "ds-vit://SLURM_JOB_ID%3D12%20SLURM_STEP_ID%3D3"}
    assert rendezvous(discover(environ), environ) == {"auto_mpi_discovery": False, **slurm}
    found = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
    assert found == {"MASTER_ADDR": "gpu07", "MASTER_PORT": "20099", "RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}
    environ = SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}
    rendezvous(discover(environ), environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("a", "7")

    mpi = Process("openmpi", 1, 2, 0, 1)
    environ = {"MASTER_PORT": "7", "PMIX_NAMESPACE": "m"}
    run = {"init_method": "ds-vit://PMIX_NAMESPACE%3Dm"}
    assert rendezvous(mpi, environ) == {"auto_mpi_discovery": True, "distributed_port": 7, **run}
    environ["MASTER_ADDR"] = "a"
    assert rendezvous(mpi, environ) == {"auto_mpi_discovery": False, **run}
    assert environ["RANK"] == "1"

    # On one host MPI is not initialised: MPI_Finalize waits for every rank, also after an error.
    environ = {"PMIX_NAMESPACE": "m"}
    assert rendezvous(Process("openmpi", 1, 2, 1, 2), environ) == {"auto_mpi_discovery": False, **run}
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("127.0.0.1", "29500")


def test_folder_of_another_run(tmp_path):
    """Two runs in one folder would mix their metrics."""
    check_folder(str(tmp_path / "new" / "deep"))
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="already holds a run"):
        check_folder(str(tmp_path))
    with pytest.raises(ValueError, match="is not a folder that can be written to"):
        check_folder(str(tmp_path / "metrics.jsonl" / "x"))
    with pytest.raises(ValueError, match="not UTF-8, and TensorBoard writes to no such folder; rename it"):
        check_folder(str(tmp_path / "r\udce9"))
    (tmp_path / "summary.json").unlink()
    (tmp_path / "checkpoints").mkdir()
    unreadable = mock.patch.object(Path, "iterdir", side_effect=PermissionError(13, "Permission denied"))
    with unreadable, pytest.raises(ValueError, match="Permission denied"):
        check_folder(str(tmp_path), resumes=True)


def shared(folders):
    """On a rank, which is a host: what the check of its folder raises, after a check that passes."""
    import torch.distributed as dist

    rank, one = dist.get_rank(), Process("env", dist.get_rank(), 2, 0, 1)
    check_shared(folders[0], one, seconds=20)
    try:
        check_shared(folders[rank], one, seconds=0.5)
    except EndedTogether as error:
        return str(error)


def test_output_folder_that_is_not_shared(ranks, tmp_path):
    # Catches: a host with a separate folder, where its part of the run is lost; marks that are not removed.
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    for error in ranks.run(2, shared, folders):
        assert "not the folder that rank 0 writes to" in error
    assert [*tmp_path.glob("*/*"), *tmp_path.glob("*/.*")] == []


# ---- placement -------------------------------------------------------------------------------------------------------


def test_tp_stays_inside_a_host_then_pp_then_dp():
    """An order of ranks that puts stages or replicas of one group apart would send more over the network."""
    layout = Layout(pp=2, dp=2, tp=4)
    for hosts, inside, across in (
        ("ab", "tp, pp", "dp"),
        ("abcd", "tp", "pp, dp"),
        ("abcdefgh", "nothing", "tp, pp, dp"),
    ):
        rows = placement_rows(layout, [name for name in hosts for _ in range(16 // len(hosts))])
        assert rows[-2:] == [("inside a host", inside), ("across hosts", across)]
    assert placement_rows(Layout(dp=2), ("a", "b"))[-2:] == [("inside a host", "nothing"), ("across hosts", "dp")]


def test_the_map():
    """A map with a wrong replica or stage is worse than none."""
    rows = dict(placement_rows(Layout(pp=2, dp=2, tp=2), ("a",) * 3 + ("b",) * 5))
    assert rows["a"] == "ranks 0-2, replica 0, stage 0-1, tp 0-1"
    assert rows["b"] == "ranks 3-7, replica 0-1, stage 0-1, tp 0-1"
    assert rows["inside a host"] == "nothing"
    assert rows["across hosts"] == "tp, pp, dp"
    many = placement_rows(Layout(dp=100), [f"n{i}" for i in range(100)])
    assert len(many) == 19
    assert many[16] == ("…", "and 84 hosts more")


def test_tp_across_hosts_is_refused():
    """Tensor parallelism over the network, found out by a step that takes ten times as long."""
    check_tp_inside_hosts(Layout(dp=4, tp=4), Process("env", 0, 16, 0, 8), allowed=False)
    check_tp_inside_hosts(Layout(dp=1, tp=4), Process("env", 0, 4, 0, 4), allowed=False)
    check_tp_inside_hosts(Layout(dp=8, tp=2), Process("slurm", 0, 16, 0, None), allowed=False)
    apart = Layout(dp=2, tp=8), Process("env", 0, 16, 0, 4)
    with pytest.raises(ValueError, match=r"--tp 8 with 4 ranks per host.*--tp 1 or 2 or 4 stays inside"):
        check_tp_inside_hosts(*apart, allowed=False)
    check_tp_inside_hosts(*apart, allowed=True)
    with pytest.raises(ValueError, match="no effect"):
        check_tp_inside_hosts(Layout(dp=4, tp=4), Process("env", 0, 16, 0, 8), allowed=True)
