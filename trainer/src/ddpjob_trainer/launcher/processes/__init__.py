"""Start worker processes: fresh (children), or from warm spares (spares, fork_server)."""
