"""Claims: what textbooks say of architectures, put to the test on this machine. `hora claims --list` names them all."""
