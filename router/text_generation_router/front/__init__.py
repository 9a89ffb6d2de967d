"""The link between the HTTP workers of a router and its scheduler process.

HTTP worker                                          scheduler process
RemoteCluster ── Link ═══ Unix socket, frames ═══ Link ── WorkerSession ──► Cluster ──► shards
 (remote_cluster.py)        front.proto                    (server.py, columns.py)
"""
