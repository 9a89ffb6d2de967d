"""The link between the HTTP workers of a router and its scheduler process.

HTTP worker                                                     scheduler process
RemoteCluster ── SchedulerLink ── Link ═══ Unix socket ═══ Link ── WorkerConnection ──► Cluster ──► shards
                                          worker_link.proto          (server.py, columns.py)
"""
