"""The operator's hands and ears: it talks to the cluster and decides nothing (see core/)."""
