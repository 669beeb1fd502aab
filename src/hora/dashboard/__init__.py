"""The page: a run in the browser while it lives and afterwards, read from its memory alone. It imports no torch.

browser  <── HTML, JavaScript, server-sent events ──  App  <── Feed (one poller a run) ──  the run's memory
                                                       └ Runs   which there are, and what is known of each
"""
