"""FreshPER: a module per idea of the paper, in the order of README.md, and the machine that runs
them."""
