"""The fork server of a host: one process that imports torch and Hora once; ranks, servers and predictor are its forks.

client        ForkServer: the launcher's connection to it
server        the process itself
interpreter   makes a forked child indistinguishable from an interpreter that was started anew
"""
