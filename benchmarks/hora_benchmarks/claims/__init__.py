"""Claims of the textbooks about distributed training, tested on this machine. `hora claims --list` lists them."""
