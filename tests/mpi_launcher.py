"""Starts ranks with the MPI launchers that are installed, for tests."""
import os
import pathlib
import shutil

LAUNCHERS = [name for name in ("mpirun.openmpi", "mpirun.mpich") if shutil.which(name)]


# Before a program: it has the variables that srun gives a rank, which say nothing of the ranks of its host.
AS_SRUN = ["sh", "-c", "export SLURM_STEP_NUM_TASKS=$OMPI_COMM_WORLD_SIZE; unset MPI_LOCALRANKID MPI_LOCALNRANKS "
           "$(env | sed -n 's/^\\(OMPI_COMM_WORLD[A-Z_]*\\)=.*/\\1/p'); exec \"$0\" \"$@\""]


def launch(launcher, parts, folder):
    """The command that starts for each (n, program and arguments) of `parts` n ranks, and its environment. What a
    killed job leaves of Open MPI's own files goes with the folder.
    """
    command = [launcher]
    if launcher == "mpirun.openmpi":
        command += ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    for i, (n, arguments) in enumerate(parts):
        command += [":"] * (i > 0) + ["-np", str(n), *arguments]
    return command, dict(os.environ, TMPDIR=folder, OMPI_MCA_btl_vader_backing_directory=folder)


def is_alive(process):
    """Whether it runs, other than as a zombie."""
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return False
