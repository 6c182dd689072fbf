"""Objects of schedulers beside the pods: PodGroups, and Workloads of Kueue."""
