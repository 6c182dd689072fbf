"""Worker processes: started afresh (children), or called from warm spares (spares, fork_server)."""
