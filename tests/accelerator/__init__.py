"""A simulated accelerator: a torch device "sim" without a GPU, on which mistakes of streams and
memory show. See README.md."""
