"""Many machines from one command: an agent on each host starts what the launcher asks for."""
