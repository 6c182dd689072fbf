"""One file per command: functions of kubectl and the options that print and return an exit code."""
