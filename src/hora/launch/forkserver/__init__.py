"""The fork server of a host: one process that imports torch and Hora once; ranks, servers and predictor are its forks.

messages      what a launcher and a fork server say to each other
client        the launcher's end: `ForkServer`, and `Process` for each process that it has started
server        the process itself
interpreter   makes a forked child indistinguishable from an interpreter that was started anew
"""
