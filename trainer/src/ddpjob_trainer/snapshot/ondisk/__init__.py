"""Read and write a snapshot directory: durable files, their lineage and retention."""
