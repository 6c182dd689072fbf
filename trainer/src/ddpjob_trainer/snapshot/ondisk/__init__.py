"""What lies in a snapshot directory: durable files, their lineage and retention."""
