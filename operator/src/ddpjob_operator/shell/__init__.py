"""Connect the operator to the cluster, and decide nothing (see core/)."""
