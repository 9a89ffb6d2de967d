"""The link between the HTTP workers of a router and its scheduler process.

HTTP worker                                                     scheduler process
RemoteCluster ── SchedulerLink ── Link ═══ Unix socket ═══ Link ── WorkerSession ──► Cluster ──► shards
                                             front.proto              (server.py, columns.py)
"""
