"""Starting ranks: by our own launcher, or as guests of torchrun, Slurm and mpirun. Importing this imports no torch."""
