"""Wire: what travels between hosts in fewer bytes than it has."""
