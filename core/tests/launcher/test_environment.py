"""Variables as the systems really set them, and what they must be read as."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shard_core.errors import LaunchError
from shard_core.launcher.environment import detect, export
from shard_core.launcher.interface import ProcessInfo

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "host1",
    "MASTER_PORT": "29512",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}
KUBERNETES = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
}
# What a batch script's shell gets; `srun` adds the step's.
SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "node[01-03,7],other5",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_NTASKS": "9",
    "SLURM_NPROCS": "9",
    "SLURM_TASKS_PER_NODE": "2(x4),1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = SBATCH | {
    "SLURM_STEP_ID": "2",
    "SLURM_STEPID": "2",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_NODELIST": "node[01-03,7],other5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4),1",
    "SLURM_PROCID": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "3",
}
SRUN_ONE_HOST = SRUN | {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "node01",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1868103681",
    "PMIX_NAMESPACE": "1868103681",
    "PMIX_RANK": "1",
}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "3",
    "MPI_LOCALNRANKS": "4",
}


@pytest.mark.parametrize(
    ("environ", "source", "place", "main"),
    [
        (TORCHRUN, "torchrun", (5, 8, 1, 4, 1), ("host1", 29512)),
        (KUBERNETES, "Kubernetes", (2, 4, 0, 1, 2), ("job-master-0", 23456)),
        (SRUN, "SLURM", (7, 9, 1, 2, 3), ("node01", 20000 + (64 * 4711 + 2) % 10000)),
        (SRUN | {"MASTER_ADDR": "ib01", "MASTER_PORT": "7"}, "SLURM", (7, 9, 1, 2, 3), ("ib01", 7)),
        # `srun -n 2 bash train.sh` outside a batch script.
        (SRUN_ONE_HOST | {"SLURM_JOB_NAME": "bash"}, "SLURM", (1, 2, 1, 2, 0), None),
        # A batch script that exports the size, as many tutorials do, before srun.
        (SRUN_ONE_HOST, "SLURM", (1, 2, 1, 2, 0), ("127.0.0.1", 20000 + (64 * 4711 + 2) % 10000)),
        (SRUN_ONE_HOST | {"WORLD_SIZE": "2"}, "SLURM", (1, 2, 1, 2, 0), None),
        (OPEN_MPI, "Open MPI", (1, 2, 1, 2, 0), None),
        (MPICH, "PMI", (3, 4, 3, 4, 0), None),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "h"}, "Open MPI", (1, 4, 1, 2, 0), ("h", 29500)),
        # One launcher inside another: the inner one started this process.
        (SRUN | TORCHRUN, "torchrun", (5, 8, 1, 4, 1), ("host1", 29512)),
        (SBATCH | OPEN_MPI, "Open MPI", (1, 2, 1, 2, 0), None),
        (SRUN | MPICH, "SLURM", (7, 9, 1, 2, 3), None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK and WORLD_SIZE", (0, 1, 0, 1, 0), ("127.0.0.1", 29500)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK and WORLD_SIZE",
            (1, 2, 1, 2, 0),
            ("a", 1),
        ),
    ],
)
def test_place(environ, source, place, main):
    found = detect(environ)
    assert found is not None
    assert found.source == source
    assert (
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_world_size,
        found.node_rank,
    ) == place
    if main is not None:
        assert (found.main_address, found.main_port) == main


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "left", "MASTER_PORT": "1", "LOCAL_RANK": "0"},
        # A shell in which a person types, by `salloc` and by `srun --pty bash`.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n1"},
        SRUN | {"SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "1"},
        SRUN | {"SLURM_JOB_NAME": "interactive", "SLURM_STEP_NUM_TASKS": "1"},
        # One task with all the devices of a host: local ranks are for launch() to start.
        SBATCH | {"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"},
    ],
)
def test_nobody_started_ranks(environ):
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 contradicts WORLD_SIZE=8; ranks count from 0 to 7"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one' is not a whole number"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE='' is not a whole number"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 contradicts LOCAL_WORLD_SIZE=4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 contradicts WORLD_SIZE=8"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "MASTER_PORT is not"),
        ({k: v for k, v in KUBERNETES.items() if k != "MASTER_ADDR"}, "MASTER_ADDR is not"),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}, "LOCAL_WORLD_SIZE does not say"),
        (SBATCH, "SLURM_NTASKS=9, but srun did not start this process"),
        (SRUN | {"SLURM_PROCID": "9"}, "SLURM_PROCID=9 contradicts SLURM_STEP_NUM_TASKS=9"),
        (SRUN | {"SLURM_NODEID": "5"}, "SLURM_NODEID=5 contradicts SLURM_STEP_TASKS_PER_NODE"),
        (SRUN | {"SLURM_STEP_NODELIST": "node[01-"}, "cannot be read at 'node[01-'"),
        (SRUN | {"SLURM_STEP_NODELIST": "node[a-b]"}, "cannot be read at 'a-b'"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(y4)"}, "cannot be read at '2(y4)'"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID is not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "several hosts, but MASTER_ADDR is not set"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set"),
    ],
)
def test_incomplete_or_contradicting(environ, sentence):
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    assert sentence in str(caught.value)


def test_ranks_of_an_mpi_job_agree_on_a_port_of_their_own():
    def port(job, rank):
        return detect(OPEN_MPI | {"PMIX_NAMESPACE": job, "OMPI_COMM_WORLD_RANK": rank}).main_port

    assert port("a", "0") == port("a", "1")
    assert port("a", "0") != port("b", "0")
    assert detect(MPICH).main_port == detect(MPICH | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}).main_port


def test_export_fills_what_is_missing_and_keeps_what_stands(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        # Set first, so that the variables that export() makes are taken back too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "stands")
    info = ProcessInfo(
        source="mine",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        main_address="other",
        main_port=81,
    )
    export(info)
    assert os.environ["MASTER_ADDR"] == "stands"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["3", "4", "1", "2", "81"]
    assert detect() is not None
    for name in names:
        monkeypatch.delenv(name)


def test_reaches_no_torch():
    code = (
        "import sys, shard_core.launcher.choice, shard_core.launcher.environment as e;"
        "e.detect(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
