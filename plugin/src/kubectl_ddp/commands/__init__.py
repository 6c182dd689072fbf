"""Define one command per file: functions of kubectl and options that return exit codes."""
