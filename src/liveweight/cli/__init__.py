"""The command line: argv, environment, output and exit codes, and nothing else."""
