"""Notice what processes cannot report: hangs, an unresolved name, ranks that wait forever."""
