"""Notice what no process reports: hangs, a name that does not resolve, ranks that wait for ever."""
