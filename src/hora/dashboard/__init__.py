"""The dashboard: runs in the browser, live and past, read only from their directories and databases. No torch import.

browser  <── HTML, JavaScript, server-sent events ──  app  <── feed (one poller per run) ── view ──  run database
                                                       └ catalogue   which runs there are
"""
