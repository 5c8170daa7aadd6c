"""Recognising, from environment variables, the ranks that somebody else has started."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

from shard_core.errors import LaunchError
from shard_core.launcher.interface import ProcessInfo
from shard_core.launcher.node_list import expand_counts, expand_hosts

_LOCALHOST = "127.0.0.1"
_TORCH_PORT = 29500
# Below the range from which systems hand out ports by themselves.
_PORTS = range(20000, 30000)
# Names SLURM gives to jobs in which a person types: `srun --pty bash`, `salloc` with an interactive step.
_INTERACTIVE = frozenset({"bash", "sh", "zsh", "interactive"})


def detect(environ: Mapping[str, str] | None = None) -> ProcessInfo | None:
    """Find this process's place among ranks that exist.

    Args:
        environ: The variables to look at; by default this process's own.

    Returns:
        The place, or None if nobody started ranks.

    Raises:
        LaunchError: If the variables are incomplete or contradict one another; names the variable.

    Example:
        >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
        ...         "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).source
        'Open MPI'
        >>> detect({}) is None
        True
    """
    environ = os.environ if environ is None else environ
    # torch's own variables first: torchrun may itself run inside a SLURM or MPI job.
    for recognise in (_torch_variables, _open_mpi, _slurm, _pmi):
        info = recognise(environ)
        if info is not None:
            return info
    for given, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if given in environ:
            raise LaunchError(
                f"{given}={environ[given]} is set but {missing} is not; set both, or neither and let launch() "
                "start ranks."
            )
    return None


def export(info: ProcessInfo) -> None:
    """Set torch's environment variables to this process's place; those that are set stay.

    Args:
        info: The place.
    """
    variables = {
        "RANK": info.rank,
        "WORLD_SIZE": info.world_size,
        "LOCAL_RANK": info.local_rank,
        "LOCAL_WORLD_SIZE": info.local_world_size,
        "MASTER_ADDR": info.main_address,
        "MASTER_PORT": info.main_port,
    }
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


def _torch_variables(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Recognise torchrun, a Kubernetes training job, or the same variables set by hand."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if "LOCAL_RANK" in environ:
        local_rank = _integer(environ, "LOCAL_RANK")
        if "LOCAL_WORLD_SIZE" not in environ and local_rank != rank:
            raise LaunchError(
                f"LOCAL_RANK={local_rank} is not RANK={rank}, so there are several hosts, but LOCAL_WORLD_SIZE "
                "does not say how many ranks this one has; set it."
            )
        local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", world_size)
    else:
        # A pod of a training job holds one rank, and no variable has a local one.
        local_rank, local_world_size = 0, _integer(environ, "LOCAL_WORLD_SIZE", 1)
    if world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                raise LaunchError(
                    f"RANK={rank} and WORLD_SIZE={world_size} are set but {name} is not; "
                    "set it to where rank 0 listens, the same on every rank."
                )
    sources = {"TORCHELASTIC_RUN_ID": "torchrun", "KUBERNETES_SERVICE_HOST": "Kubernetes"}
    return _checked(
        ProcessInfo(
            source=next((name for sign, name in sources.items() if sign in environ), "RANK and WORLD_SIZE"),
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=_integer(environ, "GROUP_RANK", rank // max(local_world_size, 1)),
            main_address=environ.get("MASTER_ADDR", _LOCALHOST),
            main_port=_integer(environ, "MASTER_PORT", _TORCH_PORT),
        ),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    )


def _slurm(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Recognise a task of ``srun``; a shell a person types into is none, nor is a job of one task without it."""
    if "SLURM_PROCID" not in environ:
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _integer(environ, tasks, 1)
    # The name alone proves nothing: `srun -n 8 bash train.sh` is called bash too.
    if world_size == 1 and environ.get("SLURM_JOB_NAME") in _INTERACTIVE:
        return None
    if "SLURM_STEP_ID" not in environ:
        # The shell of a batch script: it carries a task's variables and is none.
        if world_size == 1:
            return None
        raise LaunchError(
            f"SLURM_NTASKS={world_size}, but srun did not start this process, so it would wait for "
            f"{world_size - 1} ranks that never come; start the script with `srun python ...`, or ask for one task."
        )
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    node_rank = _integer(environ, "SLURM_NODEID", 0)
    per_node = expand_counts(
        environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world_size)
    )
    if node_rank >= len(per_node):
        raise LaunchError(
            f"SLURM_NODEID={node_rank} contradicts SLURM_STEP_TASKS_PER_NODE, which has {len(per_node)} hosts."
        )
    job = 64 * _integer(environ, "SLURM_JOB_ID", 0) + _integer(environ, "SLURM_STEP_ID")
    return _checked(
        ProcessInfo(
            source="SLURM",
            rank=_integer(environ, "SLURM_PROCID"),
            world_size=world_size,
            local_rank=_integer(environ, "SLURM_LOCALID"),
            local_world_size=per_node[node_rank],
            node_rank=node_rank,
            main_address=environ.get("MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else _LOCALHOST),
            main_port=_integer(environ, "MASTER_PORT", _PORTS[job % len(_PORTS)]),
        ),
        ("SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    )


def _open_mpi(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Recognise a process started by Open MPI's ``mpirun``."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _mpi(environ, "Open MPI", tuple(f"OMPI_COMM_WORLD_{name}" for name in names))


def _pmi(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Recognise a process started by MPICH's or Intel MPI's ``mpiexec``."""
    return _mpi(environ, "PMI", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _mpi(environ: Mapping[str, str], source: str, names: tuple[str, ...]) -> ProcessInfo | None:
    """Read rank, size, local rank and local size; MPI has no variable for where rank 0 listens."""
    if names[0] not in environ:
        return None
    rank, world_size, local_rank, local_world_size = (_integer(environ, name) for name in names)
    several_hosts = local_world_size < world_size
    if several_hosts and "MASTER_ADDR" not in environ:
        raise LaunchError(
            f"{source} started {world_size} ranks on several hosts, but MASTER_ADDR is not set; pass the host "
            "of rank 0 to every rank, with Open MPI by `mpirun -x MASTER_ADDR=<host> ...`."
        )
    return _checked(
        ProcessInfo(
            source=source,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=rank // max(local_world_size, 1),
            main_address=environ.get("MASTER_ADDR", _LOCALHOST),
            main_port=_integer(environ, "MASTER_PORT", _TORCH_PORT if several_hosts else _job_port(environ)),
        ),
        names,
    )


def _job_port(environ: Mapping[str, str]) -> int:
    """Derive a port that the ranks of one host agree on and another job's ranks do not."""
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise LaunchError(f"{name} is not set, although the variables around it are; set it too.")
        return default
    # int() takes "1_000" and " 1"; a launcher writes neither.
    if not text.isdecimal():
        raise LaunchError(f"{name}={text!r} is not a whole number from 0; correct it or unset it.")
    return int(text)


def _checked(info: ProcessInfo, names: tuple[str, ...]) -> ProcessInfo:
    """Refuse a place that cannot be."""
    rank, world_size, local_rank, local_world_size = names
    limits: list[tuple[bool, str, int, str, int]] = [
        (info.rank >= info.world_size, rank, info.rank, world_size, info.world_size),
        (
            info.local_rank >= info.local_world_size,
            local_rank,
            info.local_rank,
            local_world_size,
            info.local_world_size,
        ),
    ]
    for wrong, name, value, limit, size in limits:
        if wrong:
            raise LaunchError(f"{name}={value} contradicts {limit}={size}; ranks count from 0 to {size - 1}.")
    if info.local_world_size > info.world_size:
        raise LaunchError(
            f"{local_world_size}={info.local_world_size} contradicts {world_size}={info.world_size}; "
            "a host cannot have more ranks than there are."
        )
    return info
