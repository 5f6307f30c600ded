"""Where the ranks of a job run: node lists, who is which rank, how they are started under SLURM and find each other."""
