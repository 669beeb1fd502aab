"""Watch: what a run shows of itself, from a worker's step to the page, the panel, the memory and the trace.

worker, server      Recorder (training/), Herald (server/)
                      │ Report, a few times a second, on the control line
launcher            Watcher
                      ├ Board      the run as it is now, and its curves; a pure state machine
                      ├ Memory     SQLite in the run's directory; whoever shows a run reads this
                      ├ Lines      the same as JSON lines
                      └ TensorBoard's event files, where they are wanted
"""
