"""One file per command: functions of kubectl and the options, which return an exit code."""
