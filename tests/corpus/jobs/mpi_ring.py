"""A healthy MPI job: all-reduces, a ring and barriers. Argument: rounds."""

import sys

from mpi4py import MPI


def main() -> None:
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    for step in range(int(sys.argv[1])):
        total = world.allreduce(rank + step)
        world.sendrecv(step, dest=(rank + 1) % size, source=(rank - 1) % size)
        world.Barrier()
        print(f"[{rank}] step {step} total {total} on {MPI.Get_processor_name()}", flush=True)


if __name__ == "__main__":
    main()
