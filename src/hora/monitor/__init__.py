"""What a run reports about itself, from a worker's step to the dashboard, the panel, the run database and the trace.

worker, server      Recorder (training/), ServerStats (server/)
                      │ WorkerReport, ServerReport, a few times a second, on the control connection
launcher            RunMonitor (launch/)
                      ├ RunState     the run now, and its curves and events; a pure state machine
                      ├ RunDatabase  SQLite in the run's directory (runs/); the dashboard and the CLI read only this
                      ├ JsonLines    logged values and events as JSON lines
                      └ TensorBoard  event files, with --tensorboard
"""
