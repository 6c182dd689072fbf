"""Read what the cluster refuses, and wait for room: quotas, PodGroups, Kueue."""
